"""Writes the Python programs of Markdown pages into a folder, each as a file of its own: programs.py FOLDER PAGE.."""

import re
import sys
from pathlib import Path

# PyTorch 2.15 says of new_group that it may return a number, and of its own collectives that they take none.
UNSOUND = '# mypy: disable-error-code="arg-type"\n# pyright: reportArgumentType=false\n'
# The Python that checks may have no Ray.
NO_RAY = '# mypy: disable-error-code="import-not-found,import-untyped"\n# pyright: reportMissingImports=false\n'

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for page in map(Path, sys.argv[2:]):
    programs = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for number, program in enumerate(programs, 1):
        if "dist.new_group(" in program:
            program = UNSOUND + program
        if "from ray." in program:
            program = NO_RAY + program
        # Of two pages of one name neither may take the other's place.
        with (folder / f"{page.stem.lower().replace('-', '_')}_{number}.py").open("x") as file:
            file.write(program)
