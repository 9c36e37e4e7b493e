"Build greedynasv2 from settings.ini, the one place where its name, version and requirements stand."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

PYTHONS = ['3.9', '3.10', '3.11', '3.12', '3.13', '3.14']
STATUS = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable']

parser = ConfigParser()
parser.read('settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']


class SdistWithSettings(sdist):
    "A source distribution that carries settings.ini, without which it could not be built again."
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, [*files, 'settings.ini'])


setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    license=cfg['license'],
    keywords=cfg['keywords'].split(),
    python_requires=f'>={cfg["min_python"]}',
    packages=find_packages(include=[cfg['lib_name'], f'{cfg["lib_name"]}.*']),
    install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix('_requirements'): v.split() for k, v in cfg.items() if k.endswith('_requirements')},
    project_urls={'Paper': cfg['paper_url']},
    classifiers=[
        f'Development Status :: {STATUS[int(cfg["status"]) - 1]}',
        f'Intended Audience :: {cfg["audience"]}',
        f'Natural Language :: {cfg["language"]}',
        *(f'Programming Language :: Python :: {v}' for v in PYTHONS[PYTHONS.index(cfg['min_python']):]),
        *cfg['classifiers'].strip().splitlines(),
    ],
    cmdclass={'sdist': SdistWithSettings},
    zip_safe=False,
)
