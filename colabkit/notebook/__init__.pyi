from .command_line import main as main
from .demonstration import DemoReport as DemoReport
from .demonstration import demo as demo
from .launcher.api import open_launcher as open_launcher
from .magics.api import load_ipython_extension as load_ipython_extension
from .magics.api import unload_ipython_extension as unload_ipython_extension
