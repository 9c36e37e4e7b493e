"Build the studies from their settings.ini. They are installed next to the library and never published with it."
from configparser import ConfigParser

from setuptools import find_packages, setup

parser = ConfigParser()
parser.read('settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=cfg['description'],      # pyproject.toml, which nbdev writes, asks for one
    author=cfg['author'],
    license=cfg['license'],
    keywords=cfg['keywords'].split(),
    python_requires=f'>={cfg["min_python"]}',
    packages=find_packages(include=[cfg['lib_name']]),
    install_requires=cfg['requirements'].split(),
    classifiers=[f'Programming Language :: Python :: {cfg["min_python"]}', 'Private :: Do Not Upload'],
    zip_safe=False,
)
