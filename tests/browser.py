"JupyterLab on this machine only, and a headless Chromium that looks at it: for tests of widgets and screenshots."
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update',
         '--disable-sync', '--no-first-run']


def missing():
    "Why there can be no browser test here; empty when there can."
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return 'the Python package playwright is not installed'
    return '' if shutil.which('chromium') else 'there is no chromium on this machine (apt-get install chromium)'


def environment(folder):
    "Variables for a JupyterLab that leaves no trace outside `folder`."
    config = folder/'jupyter-config'
    (config/'labconfig').mkdir(parents=True, exist_ok=True)
    quiet = {'@jupyterlab/apputils-extension:announcements': True}
    (config/'labconfig'/'page_config.json').write_text(json.dumps({'disabledExtensions': quiet}))
    return {**os.environ, 'JUPYTER_CONFIG_DIR': str(config), 'JUPYTER_RUNTIME_DIR': str(folder/'jupyter-runtime'),
            'JUPYTERLAB_SETTINGS_DIR': str(folder/'lab-settings'),
            'JUPYTERLAB_WORKSPACES_DIR': str(folder/'lab-workspaces'),
            'IPYTHONDIR': str(folder/'ipython'), 'OMP_NUM_THREADS': '1',
            'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])}


@contextmanager
def jupyter_lab(folder):
    "Within: JupyterLab that serves `folder` on 127.0.0.1; a function that makes addresses of notebooks."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    token, url = secrets.token_hex(16), f'http://127.0.0.1:{port}'
    command = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--ip=127.0.0.1', f'--port={port}', '--allow-root',
               '--ServerApp.port_retries=0', f'--IdentityProvider.token={token}', f'--ServerApp.root_dir={folder}',
               '--expose-app-in-browser']
    with open(folder/'lab.log', 'wb') as log:
        server = subprocess.Popen(command, env=environment(folder), stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f'{url}/api?token={token}', timeout=2).read()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError((folder/'lab.log').read_text()[-2000:]) from None
                time.sleep(.2)
        yield lambda name: f'{url}/doc/tree/{name}?token={token}&reset'
    finally:
        server.send_signal(signal.SIGTERM)                     # it ends its kernels, too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def chromium(**context):
    "Within: a headless Chromium to open pages in."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which('chromium'), args=FLAGS)
        try:
            yield browser.new_context(**{'viewport': dict(width=1300, height=1100), **context})
        finally:
            browser.close()


def notebook(path, source, **parameters):
    "Write a notebook to `path`: one of nbs/ by name with these parameters, or a list of cells."
    if isinstance(source, str):
        nb = parameterize_notebook(load_notebook_node(str(ROOT/f'nbs/{source}.ipynb')), parameters)
    else:
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in source])
    nb.metadata['kernelspec'] = dict(display_name='python3', language='python', name='python3')
    nbformat.write(nb, path)


def open_notebook(page, address, theme='light'):
    "Open a notebook in JupyterLab and wait for its kernel."
    page.goto(address)
    page.wait_for_selector('.jp-Notebook .jp-Cell', timeout=60_000)
    page.wait_for_function('() => window.jupyterapp')
    name = {'light': 'JupyterLab Light', 'dark': 'JupyterLab Dark'}[theme]
    page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
    idle = "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    page.wait_for_function(idle, timeout=90_000)


def run_cells(page):
    "Run all cells of the notebook on the page; does not wait for them."
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")


def photograph(page, path):
    "The widget on the page in JupyterLab's light theme, <path>.png, and the dark one, <path>_dark.png; the files."
    files = []
    for theme, suffix in ('Dark', '_dark'), ('Light', ''):
        page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
                      f'JupyterLab {theme}')
        page.wait_for_timeout(1500)
        box = page.locator('.jp-OutputArea-output > .widget-vbox').first
        box.scroll_into_view_if_needed()
        files.append(Path(f'{path}{suffix}.png'))
        box.screenshot(path=files[-1])
    return files
