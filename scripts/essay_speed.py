"""Measures how fast the essay responds: first paint and every control, in a Chromium slowed four times.

    python scripts/essay_speed.py [dist/pages/essay.html] [--axe axe.min.js] [--shots FOLDER]

Each control is moved to each of its positions (sliders to at most nine), in five sweeps over the page. A move
is timed from the event until the browser has painted the frame after it. Its median of five counts, since the
browser slows a page down by stopping it for a moment now and then. ``--axe`` takes a copy of axe-core and
lists what it finds in both colour schemes. ``--shots`` writes screenshots at four widths, light and dark.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.essay import NAME
from scripts.files import ROOT, answered, made
from scripts.first_screens import browser, photograph, requested, screen

SLOWED, SWEEPS, WIDTHS = 4, 5, (360, 768, 1200, 1600)
_MOVES = """
const done = arguments[arguments.length - 1], times = [];
const frame = () => new Promise(go => requestAnimationFrame(() => setTimeout(go, 0)));
const timed = async (what, act) => {
    await frame(); await frame();
    const begin = performance.now();
    act();
    const worked = performance.now() - begin;
    await frame();
    times.push([what, worked, performance.now() - begin]);
};
(async () => {
    for (const figure of document.querySelectorAll('.scene figure')) {
        const scene = figure.closest('.scene').id;
        figure.scrollIntoView({behavior: 'instant', block: 'center'});
        await new Promise(go => setTimeout(go, 300));
        for (const input of figure.querySelectorAll('input[type=radio]'))
            if (!input.checked) await timed(`${scene} ${input.name} ${input.value}`, () => input.click());
        for (const input of figure.querySelectorAll('input[type=range]')) {
            const most = +input.max, some = Math.min(most, 8);
            for (let step = 0; step <= some; step++)
                await timed(`${scene} ${input.name} ${Math.round(step / some * most)}`, () => {
                    input.value = Math.round(step / some * most);
                    input.dispatchEvent(new Event('input', {bubbles: true}));
                });
        }
        for (const button of figure.querySelectorAll('button'))
            if (button.isConnected && button.offsetParent) {
                await timed(`${scene} ${button.textContent}`, () => button.click());
                if (button.isConnected && button.textContent === 'Pause') button.click();
            }
    }
    done(times);
})();
"""
_AXE = """
const done = arguments[arguments.length - 1];
const say = it => `${it.id}: ${it.nodes.length} × ${it.help} ${it.nodes[0].html.slice(0, 120)}`;
axe.run(document).then(found => done(found.violations.map(say)));
"""


def measured(driver: Any, page: Path) -> None:
    """Print the first paint, and how long the controls take."""
    driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", {"rate": SLOWED})
    paints = []
    for _ in range(5):
        driver.get("about:blank")
        driver.get(page.as_uri())
        wait = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 0))"
        driver.execute_async_script(wait)
        paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        paints.append(driver.execute_script(paint))
    driver.set_script_timeout(600)
    sweeps = []
    for _ in range(SWEEPS):
        driver.get("about:blank")
        driver.get(page.as_uri())
        sweeps.append(driver.execute_async_script(_MOVES))
    driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", {"rate": 1})
    print(f"processor slowed {SLOWED} times; first paint {', '.join(f'{it:.0f}' for it in paints)} ms")
    times = [
        (what, *(statistics.median(sweep[move][place] for sweep in sweeps) for place in (1, 2)))
        for move, (what, _, _) in enumerate(sweeps[0])
    ]
    for name, place in (("script", 1), ("until painted", 2)):
        took = sorted(each[place] for each in times)
        late = sum(it > 50 for it in took)
        print(
            f"{len(took)} moves, {name}: median {statistics.median(took):.1f} ms, "
            f"nine in ten {took[int(0.9 * len(took))]:.1f}, most {took[-1]:.1f}; {late} over 50 ms"
        )
    for what, worked, took in sorted(times, key=lambda it: -it[2])[:8]:
        print(f"  {what}: script {worked:.1f} ms, painted after {took:.1f}")


def looked_at(page: Path, axe: Path | None, shots: Path | None) -> None:
    """Measure, check accessibility and take screenshots, as the options say."""
    with TemporaryDirectory() as folder, browser(Path(folder), logged=True) as driver:
        measured(driver, page)
        own = (page.as_uri(), "about:blank", "data:")
        others = [url for url in requested(driver) if not url.startswith(own)]
        print(f"requests besides the page itself: {len(others)}", *others[:5], sep="\n  ")
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            driver.get(page.as_uri())
            if axe is not None:
                driver.execute_script(axe.read_text(encoding="utf-8"))
                found = driver.execute_async_script(_AXE)
                print(f"axe-core, {scheme}: {len(found)} violations", *found, sep="\n  ")
            if shots is None:
                continue
            for width in WIDTHS:
                with screen(driver, width, 900):
                    driver.get("about:blank")
                    driver.get(page.as_uri() + "#at=phases&moment=4")
                    driver.execute_async_script("setTimeout(arguments[0], 500)")
                    photograph(driver, made(shots) / f"essay-{width}-{scheme}.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="essay_speed.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "dist" / "pages" / NAME)
    parser.add_argument("--axe", type=Path, metavar="FILE", help="axe-core's axe.min.js")
    parser.add_argument("--shots", type=Path, metavar="FOLDER", help="write screenshots here")
    options = parser.parse_args(arguments)
    return answered("essay_speed", lambda: looked_at(options.page.resolve(), options.axe, options.shots))


if __name__ == "__main__":
    sys.exit(main())
