"Build the studies from their settings.ini. They are installed beside the library and never published with it."
from configparser import ConfigParser

from setuptools import find_packages, setup

parser = ConfigParser()
parser.read('settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    author=cfg['author'],
    license=cfg['license'],
    keywords=cfg['keywords'].split(),
    python_requires=f'>={cfg["min_python"]}',
    packages=find_packages(include=[cfg['lib_name']]),
    install_requires=cfg['requirements'].split(),
    zip_safe=False,
)
