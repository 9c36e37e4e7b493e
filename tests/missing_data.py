"Print a pattern of the notebooks that nbdev_test skips: those whose data cannot be had here."
import sys

from greedynasv2.core import InputError
from greedynasv2.nasbench import load_macro

NEVER = '^[_.]'
# Of the library, then of the studies
NEEDS_MACRO = ('^(04_nasbench|08_vpu|09_filters|10_sampler|12_algorithm|17_training|18_nsga2'
               '|01_macro|03_reproduce|04_claims|explore_filter)')

try:
    load_macro()
    skip = NEVER
except InputError as e:
    print(f'Skipped {NEEDS_MACRO[1:]}: {e}', file=sys.stderr)
    skip = f'{NEVER}|{NEEDS_MACRO}'
print(skip)
