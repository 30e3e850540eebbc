"""Writes the test of a build into the current folder, as in ``python -m muon_tutorial.learn.builds ring``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = {path.stem: path for path in Path(__file__).with_name("tests").glob("[!_]*.py")}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m muon_tutorial.learn.builds", description=__doc__)
    parser.add_argument("build", choices=sorted(TESTS))
    build = parser.parse_args().build
    test, text = Path(f"test_{build}.py"), TESTS[build].read_text(encoding="utf-8")
    if test.exists() and test.read_text(encoding="utf-8") != text:
        sys.exit(f"{test} is there already, and is not this test; rename it, or choose another folder")
    test.write_text(text, encoding="utf-8")
    print(f"python {test} tests the {build}.py that you write beside it")
