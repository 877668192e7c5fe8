"""Complete models as PyTorch modules; `features` makes them what a job can run.

They may import `stages` and lower layers, never `features`.
"""

from amtcore.models.carfac import CARFAC as CARFAC
from amtcore.models.dau1997 import Dau1997 as Dau1997
from amtcore.models.glasberg2002 import Glasberg2002 as Glasberg2002
from amtcore.models.king2019 import King2019 as King2019
from amtcore.models.moore2016 import Moore2016 as Moore2016
from amtcore.models.osses2021 import Osses2021 as Osses2021
from amtcore.models.paulick2024 import Paulick2024 as Paulick2024
from amtcore.models.sai import SAI as SAI
