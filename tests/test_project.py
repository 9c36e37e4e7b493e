"What accompanies the code agrees with it: citation, changelog, forms, links between documents."
import re
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob('*.md'), *(ROOT/'docs').glob('*.md')]


@pytest.fixture
def settings():
    "The only section of settings.ini."
    parser = ConfigParser()
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


def anchors(path):
    "The names by which GitHub links to the headings of a document."
    headings = re.findall(r'^#+ (.+)$', path.read_text(encoding='utf-8'), re.M)
    return {re.sub(r'[^\w\- ]', '', h.lower()).replace(' ', '-') for h in headings}


def test_citation_names_this_version_and_the_paper(settings):
    "Version, license and address as in settings.ini, and seven authors of the paper."
    citation = yaml.safe_load((ROOT/'CITATION.cff').read_text(encoding='utf-8'))
    assert citation['cff-version'] == '1.2.0' and {'message', 'title', 'authors'} <= set(citation)
    assert (citation['version'], citation['license']) == (settings['version'], settings['license'])
    paper = citation['preferred-citation']
    assert paper['url'] == settings['paper_url'] and paper['year'] == 2022
    assert all(f'{a["given-names"]} {a["family-names"]}' in (ROOT/'README.md').read_text() for a in paper['authors'])
    assert len(paper['authors']) == 7


def test_nbdev_3_reads_the_same_settings(settings):
    "The table in pyproject.toml repeats what settings.ini says."
    table = tomllib.loads((ROOT/'pyproject.toml').read_text(encoding='utf-8'))['tool']['nbdev']
    for name in 'lib_path', 'nbs_path', 'tst_flags':
        assert table[name] == settings[name]
    assert table['recursive'] == settings.getboolean('recursive')
    assert table['allowed_cell_metadata_keys'] == settings['allowed_cell_metadata_keys'].split()


def test_changelog_has_this_version(settings):
    "What is not released yet comes first."
    versions = re.findall(r'^## \[?([\w.]+)\]?', (ROOT/'CHANGELOG.md').read_text(encoding='utf-8'), re.M)
    assert versions[0] == 'Unreleased' and settings['version'] in versions


def test_bug_form_is_one_that_github_shows():
    "Name, description and a body whose questions have labels."
    form = yaml.safe_load((ROOT/'.github/ISSUE_TEMPLATE/bug.yml').read_text(encoding='utf-8'))
    assert form['name'] and form['description']
    assert all(question['attributes']['label'] for question in form['body'])
    assert len({question['id'] for question in form['body']}) == len(form['body'])


@pytest.mark.parametrize('path', DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    "Every link and picture that is no address on the web is a file of the project, with the heading that it names."
    for link in re.findall(r'\]\(([^)\s]+)\)', path.read_text(encoding='utf-8')):
        if re.match(r'https?:|mailto:', link):
            continue
        name, _, heading = link.partition('#')
        target = path.parent/name if name else path
        assert target.exists(), f'{path.name} links to {link}, which is not there'
        if heading:
            assert heading in anchors(target), f'{path.name} links to {link}; {target.name} has no such heading'
