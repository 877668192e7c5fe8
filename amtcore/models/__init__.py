"""Complete models as PyTorch modules; `features` makes them what a job can run.

They may import `stages` and lower layers, never `features`.
"""

from amtcore.models.auditory_nerve import AuditoryNerve as AuditoryNerve
from amtcore.models.auditory_spectrogram import AuditorySpectrogram as AuditorySpectrogram
from amtcore.models.carfac import CARFAC as CARFAC
from amtcore.models.cochleagram import Cochleagram as Cochleagram
from amtcore.models.dau1997 import Dau1997 as Dau1997
from amtcore.models.glasberg2002 import Glasberg2002 as Glasberg2002
from amtcore.models.king2019 import King2019 as King2019
from amtcore.models.modulation_spectrum import (
    AuditoryModulationSpectrum as AuditoryModulationSpectrum,
)
from amtcore.models.modulation_spectrum import ModulationSpectrum as ModulationSpectrum
from amtcore.models.moore2016 import Moore2016 as Moore2016
from amtcore.models.osses2021 import Osses2021 as Osses2021
from amtcore.models.paulick2024 import Paulick2024 as Paulick2024
from amtcore.models.programme_loudness import ProgrammeLoudness as ProgrammeLoudness
from amtcore.models.rate_scale import RateScale as RateScale
from amtcore.models.roughness import RoughnessDanielWeber as RoughnessDanielWeber
from amtcore.models.sai import SAI as SAI
from amtcore.models.sharpness import Sharpness as Sharpness
from amtcore.models.srmr import SRMR as SRMR
from amtcore.models.stoi import STOI as STOI
from amtcore.models.zwicker import ZwickerLoudness as ZwickerLoudness
