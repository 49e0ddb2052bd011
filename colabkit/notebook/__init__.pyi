from .command_line import main as main
from .demonstration import DemoReport as DemoReport
from .demonstration import demo as demo
from .launcher.panel import Launcher as Launcher
from .launcher.panel import launch as launch
from .magics import load_ipython_extension as load_ipython_extension
from .magics import unload_ipython_extension as unload_ipython_extension
