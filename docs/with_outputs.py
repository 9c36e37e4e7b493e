"""Copy the outputs of a notebook that was run to the one under studies/nbs/, its figures also as still images, for
viewers that run no script: `python docs/with_outputs.py reproduce_nasbench`, after `make reproduce`."""
import base64
import sys

import nbformat
import numpy as np
import plotly.graph_objects as go
from figures import ROOT, chromium, photograph

PLOTLY = 'application/vnd.plotly.v1+json'


def plain(value):
    "What plotly stored, arrays as lists."
    if isinstance(value, list):
        return [plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if 'bdata' not in value:
        return {k: plain(v) for k, v in value.items()}
    shape = [int(n) for n in value.get('shape', '-1').split(',')]
    return np.frombuffer(base64.b64decode(value['bdata']), value['dtype']).reshape(shape).tolist()


def with_image(output, context):
    "An output, and if it is a figure, a picture of it."
    fig = output.get('data', {}).get(PLOTLY)
    if fig:
        output.data['image/png'] = base64.b64encode(photograph(context, go.Figure(plain(fig)), 420)).decode()
    return output


def main(name):
    "Copy from runs/NAME.ipynb to studies/nbs/NAME.ipynb, cell by cell; what was only printed stays behind."
    ran, target = nbformat.read(ROOT/f'runs/{name}.ipynb', 4), ROOT/f'studies/nbs/{name}.ipynb'
    ours = nbformat.read(target, 4)
    cells = [c for c in ran.cells if 'injected-parameters' not in c.metadata.get('tags', [])]
    if [c.source for c in cells] != [c.source for c in ours.cells]:
        sys.exit(f'runs/{name}.ipynb is not what studies/nbs/{name}.ipynb says now; run it again.')
    with chromium(viewport=dict(width=1000, height=420)) as context:
        for cell, done in zip(ours.cells, cells, strict=True):
            if cell.cell_type == 'code':
                cell.outputs = [with_image(o, context) for o in done.outputs if o.output_type != 'stream']
    nbformat.write(ours, target)


if __name__ == '__main__':
    main(*sys.argv[1:])
