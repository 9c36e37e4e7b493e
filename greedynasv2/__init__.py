"""GreedyNASv2 in Jupyter: the names that a first day needs, each imported when it is first used."""

__version__ = "0.0.1"

import os
import sys
from importlib import import_module
from types import ModuleType

# Where each name of the front door lives. Importing the package imports none of these modules.
_HOMES = dict(
    InputError='core',
    register_op='ops',
    register_space='facts',
    get_space='spaces', SearchSpace='spaces',
    load_macro='nasbench',
    SuperNet='supernet', load_network='supernet',
    PathFilter='vpu',
    Run='runs', list_runs='runs',
    TrainConfig='training', make_config='training', train_supernet='training',
    search='nsga2',
    retrain='retraining',
    Dashboard='widgets')
_OLD_NAMES = dict(retrain='retraining')      # modules of earlier versions, and what they are called now

__all__ = ['__version__', *_HOMES]


class _Moved(ModuleType):
    "A module under its old name: reads and writes what the new one has."
    def __init__(self, name, target):
        super().__init__(f'{__name__}.{name}', f'What {__name__}.{target} has, under the name it had before.')
        self.__dict__['_target'] = f'{__name__}.{target}'

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)       # the import system asks; it must not import the target
        return getattr(import_module(self._target), name)

    def __setattr__(self, name, value):
        if name.startswith('__'):
            return super().__setattr__(name, value)
        setattr(import_module(self._target), name, value)

    def __delattr__(self, name):
        delattr(import_module(self._target), name)

    def __dir__(self):
        return dir(import_module(self._target))


class _FrontDoor(ModuleType):
    "The package: a submodule never takes the place of a function that has its name."
    def __setattr__(self, name, value):
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}; it offers {", ".join(_HOMES)}')
    value = getattr(import_module(f'{__name__}.{_HOMES[name]}'), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})


for _name, _target in _OLD_NAMES.items():
    # In `sys.modules` and not an attribute of the package: `from greedynasv2.retrain import X` finds it there
    if os.path.exists(os.path.join(os.path.dirname(__file__), f'{_target}.py')):
        sys.modules[f'{__name__}.{_name}'] = _Moved(_name, _target)
    else:
        _HOMES[_name] = _name                # the module has its old name yet
sys.modules[__name__].__class__ = _FrontDoor
