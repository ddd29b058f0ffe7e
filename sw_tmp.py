import sys, random
from concurrent.futures import ThreadPoolExecutor
from tests.property.mutants.__main__ import _simulate
from tests.property.mutants.mutant import all_mutants
names=[l.strip() for l in open(sys.argv[1]) if l.strip()]
faults=int(sys.argv[2]); seed=int(sys.argv[3]); jobs=int(sys.argv[4])
ms=[all_mutants()[n] for n in names if n in all_mutants() and all_mutants()[n].is_for_simulation]
with ThreadPoolExecutor(jobs) as pool:
    for f in [pool.submit(_simulate,m,seed,faults) for m in ms]:
        o=f.result(); print(f"{o.mutant.name}: {o.how[:200]}",flush=True)
