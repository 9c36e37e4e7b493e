"Put the outputs of a notebook that was run into the one under nbs/, with still images for viewers that run no script: `python docs/with_outputs.py reproduce_nasbench`."
import base64, sys
from pathlib import Path

import nbformat
import plotly.graph_objects as go

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
from greedynasv2.viz import as_png

PLOTLY = 'application/vnd.plotly.v1+json'


def with_image(output):
    "An output, and if it is a figure, a picture of it."
    fig = output.get('data', {}).get(PLOTLY)
    if fig: output.data['image/png'] = base64.b64encode(as_png(go.Figure(fig))).decode()
    return output


def main(name):
    "Copy from runs/NAME.ipynb to nbs/NAME.ipynb, cell by cell."
    source, target = nbformat.read(ROOT/f'runs/{name}.ipynb', 4), ROOT/f'nbs/{name}.ipynb'
    ours = nbformat.read(target, 4)
    done = [c for c in source.cells if 'injected-parameters' not in c.metadata.get('tags', [])]
    if [c.source for c in done] != [c.source for c in ours.cells]: sys.exit(f'runs/{name}.ipynb is not what nbs/{name}.ipynb says now; run it again.')
    for cell, ran in zip(ours.cells, done):
        if cell.cell_type == 'code': cell.outputs = [with_image(o) for o in ran.outputs if o.get('name') != 'stderr']
    nbformat.write(ours, target)


if __name__ == '__main__': main(*sys.argv[1:])
