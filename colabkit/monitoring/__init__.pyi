from .doctor.api import diagnose as diagnose
from .doctor.api import watch as watch
from .doctor.diagnosis import Advice as Advice
from .doctor.diagnosis import Diagnosis as Diagnosis
from .panel.api import Dashboard as Dashboard
from .panel.api import dashboard as dashboard
from .panel.api import show_beside_training as show_beside_training
from .panel.screens import Screen as Screen
