"What a module does not need at once, it does not import: training starts as fast as torch allows."
import subprocess
import sys

import pytest

# Each of them takes from a tenth of a second to two seconds to import
HEAVY = {'plotly', 'matplotlib', 'ipywidgets', 'anywidget', 'IPython', 'timm', 'torchvision', 'pymoo', 'sklearn',
         'scipy'}


@pytest.mark.parametrize('module', ['training', 'supernet', 'vpu', 'data'])
def test_a_fresh_process_imports_no_more_than_it_needs(module):
    "Figures, widgets, transforms and statistics wait until they are used."
    code = f'import sys, greedynasv2.{module}; print(*{{name.split(".")[0] for name in sys.modules}})'
    loaded = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    assert 'torch' in loaded and not HEAVY & set(loaded)
