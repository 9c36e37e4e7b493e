"Load an exported network in a process that knows only how to predict: what `make demo` ends with."
import sys
import time
from pathlib import Path

began = time.perf_counter()
import torch

from greedynasv2.spaces import read_arch
from greedynasv2.supernet import load_network

folder = Path(sys.argv[1])
model, arch = load_network(folder), read_arch(folder/'arch.json')
images = torch.rand(3, 3, arch.space.image_size, arch.space.image_size, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    logits = model(images)
    same = torch.export.load(folder/'model.pt2').module()(images)
not_for_inference = {'timm', 'pymoo', 'plotly', 'ipywidgets', 'greedynasv2.training', 'greedynasv2.retraining'}
needless = not_for_inference & set(sys.modules)
if needless:
    sys.exit(f'Loading a network should not import {", ".join(sorted(needless))}.')
if not torch.allclose(logits, same, atol=1e-4):
    sys.exit('The exported program gives other outputs than the network.')
seconds = time.perf_counter() - began
print(f'{folder}: {arch.costs["params"]:,} params, loaded and run in {seconds:.1f} s without training code; '
      'the exported program gives the same outputs.')
