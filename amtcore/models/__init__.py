"""Complete models as PyTorch modules; `features` makes them what a job can run.

They may import `stages` and lower layers, never `features`.
"""

from amtcore.models.dau1997 import Dau1997
from amtcore.models.glasberg2002 import Glasberg2002
from amtcore.models.king2019 import King2019
from amtcore.models.moore2016 import Moore2016
from amtcore.models.osses2021 import Osses2021
from amtcore.models.paulick2024 import Paulick2024

__all__ = [
    "Dau1997",
    "Glasberg2002",
    "King2019",
    "Moore2016",
    "Osses2021",
    "Paulick2024",
]
