from .doctor.asking import diagnose as diagnose
from .doctor.diagnosis import Advice as Advice
from .doctor.diagnosis import Diagnosis as Diagnosis
from .doctor.watching import watch as watch
from .panel.api import dashboard as dashboard
from .panel.api import show_beside_training as show_beside_training
from .panel.painter import Dashboard as Dashboard
from .panel.screens import Screen as Screen
