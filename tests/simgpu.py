"""A GPU that is not there: a stand-in for tests on machines without one.

Within `gpu()` tensors can be put on `cuda:0`. They say that they are there, and are computed on the CPU. What CUDA
would refuse is refused: a CPU tensor next to those of the GPU, a CPU generator for numbers that are drawn on the GPU, a
fused kernel on tensors that lie differently in memory. Every wait of the host for the device is counted, with the line
of code that caused it.

    with gpu() as device:
        device.watch(SupernetTrainer, 'train_step', 'training step')
        run = train_supernet(make_config('demo', device='cuda'), report=None)
    device.table()

Not shown: speed, memory, and the numbers that CUDA's own kernels would give. To torch itself the tensors are on `meta`,
for which it has no kernels and no streams; this uses inner parts of torch, so it works with one version of it.
"""
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

KNOWN = '2.15'                                  # the torch whose inner parts this knows
HERE = str(Path(__file__).resolve().parent)
META = torch.device('meta')
CPU = torch.device('cpu')

# Pointwise ops that take a CPU tensor without dimensions next to tensors of the GPU; `clamp` is none of them
TAKES_CPU_SCALAR = set('''
    add sub rsub mul div true_divide floor_divide remainder fmod pow eq ne lt le gt ge maximum minimum fmax fmin atan2
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor lerp where addcmul addcdiv clamp_min clamp_max
    masked_fill fill xlogy hypot copysign'''.split())
# Ops whose result, or the size of it, the host has to know before it can go on
WAITS = set('''
    _local_scalar_dense nonzero masked_select _unique _unique2 unique_dim unique_consecutive equal is_nonzero bincount
    repeat_interleave nms'''.split())
INDEXING = set('index index_put _index_put_impl _unsafe_index _unsafe_index_put'.split())
COPIES = set('copy _to_copy _foreach_copy'.split())
# What autocast computes in its lower precision, and what in float32
LOW = {F.conv1d, F.conv2d, F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm,
       torch.baddbmm, torch.einsum}
HIGH = {F.cross_entropy, F.nll_loss, F.log_softmax, F.softmax, F.softplus, F.mse_loss, F.smooth_l1_loss,
        torch.log_softmax, torch.softmax, torch.exp, torch.log, torch.pow, torch.logsumexp, torch.rsqrt,
        Tensor.log_softmax, Tensor.softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.norm, Tensor.logsumexp,
        F.binary_cross_entropy_with_logits}


def need_known_torch():
    "Skip the tests of a module where torch is another one."
    if torch.__version__.startswith(KNOWN + '.'):
        return
    pytest.skip(f'The stand-in for a GPU knows torch {KNOWN}; this is {torch.__version__}. Try it by changing '
                'KNOWN in tests/simgpu.py.', allow_module_level=True)


class Gpu:
    "GPUs that are not there, and what happened on them."
    def __init__(self, n):
        self.n = n                              # how many there are
        self.current = 0                        # the current one
        self.target = None                      # the one that a call names, while it runs
        self.waits = Counter()                  # (phase, why, line of ours, line that did it) -> how often
        self.calls = Counter()                  # phase -> calls of the function that is watched
        self.launches = Counter()               # phase -> operations
        self.phases = ['elsewhere']             # functions that are watched and run now, the innermost last
        self.random = [None] * n                # state of each GPU's random numbers
        self.stack = ExitStack()                # what is patched
        self.seed(0)

    def seed(self, seed):
        "Seed the random numbers of all GPUs."
        for i in range(self.n):
            self.seed_one(i, seed)

    def seed_one(self, i, seed):
        "Seed the random numbers of one GPU."
        self.random[i] = torch.Generator().manual_seed(seed).get_state()

    def device(self, name):
        "The index of the GPU that a device names; None for no GPU."
        if name is None or isinstance(name, int):
            return name
        named = torch.device(name)
        if named.type != 'cuda':
            return None
        index = self.current if named.index is None else named.index
        if index >= self.n:
            raise RuntimeError(f'CUDA error: invalid device ordinal ({named})')
        return index

    def wait(self, why):
        "Count a wait of the host."
        self.waits[self.phases[-1], why, *where()] += 1

    def watch(self, owner, name, phase, unless=()):
        """From now on waits within the function `name` of `owner`, a class or a module, belong to `phase`, if no inner
        function is watched too; a call within a phase of `unless` belongs to that."""
        function = getattr(owner, name)

        @wraps(function)
        def watched(*args, **kwargs):
            if any(p in unless for p in self.phases):
                return function(*args, **kwargs)
            self.calls[phase] += 1
            self.phases.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.phases.pop()
        self.stack.enter_context(patch.object(owner, name, watched))

    def n_waits(self, phase, ours=False):
        "Waits in a phase, all its calls together; with `ours` only those of our own lines, not of libraries they call."
        return sum(n for (p, _, our, line), n in self.waits.items() if p == phase and (our == line or not ours))

    def places(self, phase=None):
        "Why and where the host waited, a row a place, the most frequent first."
        rows = [dict(phase=p, why=why, ours=ours, line=line, waits=n) for (p, why, ours, line), n in self.waits.items()]
        found = pd.DataFrame(rows, columns=['phase', 'why', 'ours', 'line', 'waits'])
        if phase:
            found = found[found.phase == phase]
        return found.sort_values('waits', ascending=False, ignore_index=True)

    def table(self):
        "A call of what is watched: waits of the host, how many of them are of our own lines, and operations."
        rows = []
        for phase, calls in self.calls.items():
            totals = self.n_waits(phase), self.n_waits(phase, ours=True), self.launches[phase]
            rows.append([phase, calls, *(n / calls for n in totals)])
        return pd.DataFrame(rows, columns=['phase', 'calls', 'waits', 'of ours', 'operations']).round(2)


def where():
    "The innermost line of this checkout on the stack, and the innermost one outside of torch and of this file."
    ours, line = '', ''
    frame = sys._getframe(2)
    while frame and not ours:
        file = frame.f_code.co_filename
        inside_torch = '/torch/' in file or file.startswith('<') or file == __file__ or '/contextlib.py' in file
        if not inside_torch:
            here = f'{Path(file).parent.name}/{Path(file).stem}.{frame.f_code.co_name}:{frame.f_lineno}'
            line = line or here
            if '/greedynasv2/' in file or file.startswith(HERE):
                ours = here
        frame = frame.f_back
    return ours, line


class Sim(Tensor):
    "A tensor on a GPU that is not there: for C++ one on `meta`, for Python one on `cuda`; its numbers are in `held`."
    __torch_function__ = torch._C._disabled_torch_function_impl
    gpu = None                                  # the `Gpu` of the `with` that is open

    @staticmethod
    def __new__(cls, held, index):
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=META)

    def __init__(self, held, index):
        self.held = held
        self.index = index

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)
    device = property(lambda self: torch.device('cuda', self.index))
    def get_device(self): return self.index
    def is_pinned(self, device=None): return False
    def __repr__(self, **kwargs): return f'Sim({self.held}, index={self.index})'
    def __reduce_ex__(self, protocol): return Sim, (self.held.detach(), self.index)

    def tolist(self):
        self.gpu.wait('tolist')
        return self.held.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. "
                        "Use Tensor.cpu() to copy the tensor to host memory first.")
    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): return run(func, args, kwargs or {})


def changed(function, x):
    "`x` with `function` done to all that lists, tuples and dictionaries in it hold."
    if isinstance(x, (list, tuple)):
        return type(x)([changed(function, y) for y in x])
    if isinstance(x, dict):
        return {k: changed(function, y) for k, y in x.items()}
    return function(x)


def tensors_in(x):
    "All tensors in lists, tuples and dictionaries."
    found = []

    def look(y):
        if isinstance(y, Tensor):
            found.append(y)
    changed(look, x)
    return found


def is_sim(x): return isinstance(x, Sim)
def is_cpu_tensor(x): return isinstance(x, Tensor) and not isinstance(x, Sim)


def lie_alike(a, b):
    "Have two tensors equal shapes, and equal strides where a dimension is longer than 1?"
    if a.shape != b.shape:
        return False
    return all(n == 1 or i == j for n, i, j in zip(a.shape, a.stride(), b.stride(), strict=True))


def refuse_mixed(func):
    raise RuntimeError('Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! '
                       f'(when running {func})')


def check_devices(gpu, func, key, args, sims, cpu):
    "CUDA's rules about tensors on different devices."
    if len({s.index for s in sims}) > 1:
        raise RuntimeError('Expected all tensors to be on the same device, but found several GPUs '
                           f'(when running {func})')
    if not sims or not cpu:
        return
    if key in INDEXING:
        return check_index(gpu, func, args)
    name = key.removeprefix('_foreach_')
    if name not in TAKES_CPU_SCALAR or len(cpu) > 1 or any(t.ndim for t in cpu):
        refuse_mixed(func)
    in_place = func._schema.name.endswith('_')
    if in_place and is_cpu_tensor(args[0]):
        refuse_mixed(func)


def check_index(gpu, func, args):
    "A CPU index into a tensor of the GPU is copied there; the other way is refused."
    if is_cpu_tensor(args[0]):
        raise RuntimeError('indices should be either on cpu or on the same device as the indexed tensor (cpu) '
                           f'({func})')
    value = args[2] if len(args) > 2 else None
    if is_cpu_tensor(value) and value.ndim:
        refuse_mixed(func)
    for index in args[1]:
        if is_cpu_tensor(index):
            gpu.wait('index on the CPU')


def check_generator(func, kwargs):
    "Numbers on the GPU are drawn by a generator of the GPU."
    generator = kwargs.get('generator')
    if generator is not None and generator.device.type == 'cpu':
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' (when running {func})")


def check_fused(func, args):
    "A fused kernel goes through memory: parameters, gradients and buffers have to lie there alike."
    lists = [group for group in args[:3] if isinstance(group, (list, tuple)) and len(group)]
    for first, *others in zip(*lists, strict=False):
        if all(t.dtype == first.dtype and lie_alike(t, first) for t in others):
            continue
        raise RuntimeError(f'params, grads and state must have the same dtype, size and strides (when running {func})')


def count_waits(gpu, key, args):
    "Waits that an operation on tensors of the GPU is known for."
    if key in WAITS:
        gpu.wait('item' if key == '_local_scalar_dense' else key)
    if key not in INDEXING:
        return
    masks = [i for i in args[1] if is_sim(i) and i.dtype in (torch.bool, torch.uint8)]
    value = args[2] if len(args) > 2 else None
    accumulates = len(args) > 3 and args[3]
    is_masked_fill = value is not None and value.numel() == 1 and len(args[1]) == 1 and not accumulates
    if masks and not is_masked_fill:
        gpu.wait('boolean index')


def count_copy(gpu, source, to_gpu, non_blocking):
    "A copy between host and GPU: the host waits, unless it is asked not to."
    if is_sim(source) == to_gpu:
        return
    way = 'to the GPU' if to_gpu else 'from the GPU'
    if not non_blocking:
        gpu.wait(f'copy {way}')
    elif to_gpu and not getattr(source, 'pinned', False):
        gpu.wait(f'copy {way} from memory that is not pinned')


def target_of(gpu, func, args, kwargs, sims):
    "Index of the GPU that the result of an operation is on; None = the CPU."
    device = kwargs.get('device')
    if device is not None:
        device = torch.device(device)
        if device.type == 'meta':
            return gpu.current if gpu.target is None else gpu.target
        return gpu.device(device)
    return sims[0].index if sims else None


def run(func, args, kwargs):
    "One operation of ATen: checked and counted as on a GPU, computed on the CPU."
    gpu = Sim.gpu
    tensors = tensors_in((args, kwargs))
    sims = [t for t in tensors if is_sim(t)]
    index = target_of(gpu, func, args, kwargs, sims)
    if index is None and not sims:
        return func(*args, **kwargs)
    key = func._schema.name.split('::')[1].removesuffix('_')
    gpu.launches[gpu.phases[-1]] += 1
    if key == 'copy':
        count_copy(gpu, args[1], is_sim(args[0]), kwargs.get('non_blocking') or len(args) > 2 and args[2])
    elif key == '_to_copy':
        count_copy(gpu, args[0], index is not None, kwargs.get('non_blocking'))
    elif key not in COPIES:
        check_devices(gpu, func, key, args, sims, [t for t in tensors if is_cpu_tensor(t)])
    count_waits(gpu, key, args)
    if key.startswith('_fused_'):
        check_fused(func, args)
    if index is not None:
        check_generator(func, kwargs)
    return raised(func, compute(gpu, func, key, args, kwargs, index), sims, index)


def compute(gpu, func, key, args, kwargs, index):
    "Do it with the numbers that the tensors hold; what is drawn on a GPU comes from that GPU's random numbers."
    def lowered(x):
        if is_sim(x):
            return x.held
        return CPU if isinstance(x, torch.device) else x
    args, kwargs = changed(lowered, (args, kwargs))
    if key == '_to_copy':
        kwargs.pop('pin_memory', None)
        kwargs['non_blocking'] = False
        source = args[0]
        if source.dtype == kwargs.get('dtype', source.dtype):
            kwargs.setdefault('memory_format', torch.preserve_format)
    if index is None or torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(gpu.random[index])
    try:
        return func(*args, **kwargs)
    finally:
        gpu.random[index] = torch.default_generator.get_state()
        torch.default_generator.set_state(before)


def raised(func, out, sims, index):
    "Put the results on the GPU; a tensor that was written into is the one that was given."
    known = {id(s.held): s for s in sims}

    def up(x):
        if not isinstance(x, Tensor):
            return x
        if id(x) not in known:
            return x if index is None else Sim(x, index)
        same = known[id(x)]
        if not lie_alike(same, x):
            raise NotImplementedError(f'The stand-in cannot follow {func}: it changes the shape of a tensor in place.')
        return same
    return changed(up, out)


class Operations(TorchDispatchMode):
    "Every operation, also those that make the first tensor on the GPU."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): return run(func, args, kwargs or {})


class Calls(TorchFunctionMode):
    "Every call from Python: devices get names that this torch can make tensors on, and autocast casts."
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        before, self.gpu.target = self.gpu.target, None
        try:
            if func is Tensor.cuda:
                return args[0].to(self.renamed(torch.device('cuda', *args[1:])))
            if kwargs.get('device') is not None:
                kwargs['device'] = self.renamed(kwargs['device'])
            if func is Tensor.to and len(args) > 1:
                args = (args[0], self.renamed(args[1]), *args[2:])
            if func in (torch.tensor, torch.as_tensor) and kwargs.get('device') == META:
                return func(*args, **{**kwargs, 'device': CPU}).to(META)
            if torch.is_autocast_enabled('cuda'):
                args, kwargs = cast(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.gpu.target = before

    def renamed(self, device):
        "`meta` for a GPU, whose number is kept aside."
        if not isinstance(device, (str, torch.device, int)):
            return device
        index = self.gpu.device(device)
        if index is None:
            return device
        self.gpu.target = index
        return META


def cast(func, args, kwargs):
    "What autocast does to floats of the GPU before some calls."
    if func in LOW:
        dtype = torch.get_autocast_dtype('cuda')
    elif func in HIGH:
        dtype = torch.float32
    else:
        return args, kwargs

    def to(x):
        if not is_sim(x) or not x.is_floating_point() or x.dtype in (torch.float64, dtype):
            return x
        return x.to(dtype)
    return changed(to, (args, kwargs))


def grouped(lists, with_indices=False):
    "Tensors of an optimizer by device and type, as torch's own function in C++ has them."
    found = {}
    full = [part or [None] * len(lists[0]) for part in lists]
    for i, row in enumerate(zip(*full, strict=True)):
        first = next(t for t in row if t is not None)
        parts, where = found.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for part, t in zip(parts, row, strict=True):
            part.append(t)
        where.append(i)
    for parts, _ in found.values():
        for i, given in enumerate(lists):
            if not given:
                parts[i].clear()
    return found


def pinned(self, device=None):
    "A copy in pinned memory, as far as the count of waits is concerned."
    copy = self.clone()
    copy.pinned = True
    return copy


def fakes(gpu):
    "What stands in for functions of torch: where -> name -> function."
    def set_device(device):
        index = gpu.device(device)
        if index is not None and index >= 0:
            gpu.current = index

    def index_of(device):
        index = gpu.device(device)
        return gpu.current if index is None else index

    def set_rng_state(state, device='cuda'): gpu.random[index_of(device)] = state.clone()

    module_apply = torch.nn.Module._apply

    def apply(self, fn, recurse=True):
        "Parameters of a module are exchanged for those on the GPU, as their type is another one."
        future = torch.__future__
        before = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            return module_apply(self, fn, recurse)
        finally:
            future.set_swap_module_params_on_conversion(before)

    cuda = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: gpu.n,
        current_device=lambda: gpu.current,
        set_device=set_device,
        synchronize=lambda device=None: gpu.wait('synchronize'),
        manual_seed=lambda seed: gpu.seed_one(gpu.current, seed),
        manual_seed_all=gpu.seed,
        get_rng_state=lambda device='cuda': gpu.random[index_of(device)].clone(),
        set_rng_state=set_rng_state,
        is_bf16_supported=lambda *args, **kwargs: True,
        is_current_stream_capturing=lambda: False,
        max_memory_allocated=lambda *args: 0,
        empty_cache=lambda: None,
        get_device_name=lambda *args: 'stand-in',
        get_device_capability=lambda *args: (8, 0))
    accelerator = dict(
        is_available=lambda: True,
        current_accelerator=lambda *args, **kwargs: torch.device('cuda'),
        current_device_index=lambda: gpu.current,
        set_device_index=set_device,
        current_stream=lambda *args: SimpleNamespace(is_capturing=lambda: False))
    return {'torch.cuda': cuda, 'torch.accelerator': accelerator, 'torch.Tensor': dict(pin_memory=pinned),
            'torch._C': dict(_group_tensors_by_device_and_dtype=grouped), 'torch.nn.Module': dict(_apply=apply)}


@contextmanager
def gpu(n=1):
    "Within: a machine with `n` GPUs, as far as Python can see."
    device = Gpu(n)
    with device.stack as stack:
        for place, functions in fakes(device).items():
            for name, function in functions.items():
                stack.enter_context(patch(f'{place}.{name}', function))
        for kinds in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
            if Sim in kinds:
                continue               # both are one list
            kinds.append(Sim)
            stack.callback(kinds.remove, Sim)
        stack.enter_context(patch.object(Sim, 'gpu', device))
        stack.enter_context(Operations())
        stack.enter_context(Calls(device))
        yield device
