#!/bin/bash
# Loads the built module alone, as Python would load it from the package.
exec "${PYTHON_BIN_PATH:-python3}" -c "
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader('_ffi', 'jax_megamoe/_ffi.so')
module = importlib.util.module_from_spec(importlib.util.spec_from_loader('_ffi', loader))
loader.exec_module(module)
print([name for name in dir(module) if not name.startswith('__')])
"
