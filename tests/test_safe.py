"Nobody gets in, no file of others is changed or deleted, and what is damaged is refused with a sentence."
import json
import os
from pathlib import Path

import pytest

from greedynasv2.workers import WorkerConfig, dist, launch

HERE = Path(__file__).resolve().parent


# -- open ports

def descendants(pid):
    "Process ids of `pid` and of all that it has started."
    found = [pid]
    for parent in found:
        for task in Path(f'/proc/{parent}/task').glob('*/children'):
            found += map(int, task.read_text().split())
    return found


def listening(pids):
    "Addresses, as hexadecimal numbers, at which these processes listen for TCP connections."
    sockets = set()
    for pid in pids:
        for link in Path(f'/proc/{pid}/fd').iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue                                     # closed in between
            if target.startswith('socket:['):
                sockets.add(target[8:-1])
    found = []
    for table in 'tcp', 'tcp6':
        for line in Path(f'/proc/net/{table}').read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == '0A' and rest[5] in sockets:
                found.append(local.partition(':')[0])
    return found


def look_at_ports(device, out):
    "What a worker does while the test looks at the sockets of all of them."
    dist.barrier()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(listening(descendants(os.getppid()))))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/net/tcp').exists(), reason='finds sockets by /proc')
def test_workers_of_one_machine_listen_on_loopback_only(tmp_path, monkeypatch):
    "Launcher and workers: no other machine can connect to them."
    monkeypatch.setenv('PYTHONPATH', f'{HERE}{os.pathsep}{os.environ.get("PYTHONPATH", "")}')
    out = tmp_path/'listening.json'
    launch('test_safe:look_at_ports', dict(out=str(out)), WorkerConfig(n_procs=2, max_restarts=0), 'cpu')
    found = json.loads(out.read_text())
    loopback = '0100007F', '00000000000000000000000001000000', '0000000000000000FFFF00000100007F'
    assert found and set(found) <= set(loopback), found
