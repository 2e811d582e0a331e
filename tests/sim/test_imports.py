import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["jaxcb.sim", "jaxcb.sim.__main__"])
def test_importing_the_simulator_leaves_jax_out(module):
    code = f"import sys, {module}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
