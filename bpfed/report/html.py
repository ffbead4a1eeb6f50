"""What all pages are made of: the document, and a figure with its words."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

# --- The page's style sheet and its one script ------------------------------------------------------------------------

#: Light by default and in print; dark where the reader's system is. Lines differ in dash as well as in colour.
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --soft: #f5f7f9; --ink: #1a1f26; --muted: #586270; --rule: #dbe0e6;
  --first: #17599e; --second: #b8500b; --fill: #c7dbf0; --tint: #fdf1e7;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #13171c; --soft: #1b2128; --ink: #e7eaee; --muted: #9da8b4; --rule: #303943;
    --first: #7db8f5; --second: #f3a663; --fill: #2b4a6b; --tint: #33261a;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 70rem; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
h1 {
  font-size: clamp(1.45rem, 4.2vw, 2.1rem); line-height: 1.2; margin: 0 0 .35rem; letter-spacing: -.01em;
  text-wrap: balance;
}
h2 { font-size: 1.25rem; margin: 2.8rem 0 .3rem; padding-top: 1.1rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; }
h1, figcaption, p { overflow-wrap: break-word; } tbody th { overflow-wrap: anywhere; }
.facts, .note, figcaption { color: var(--muted); }
figcaption, .note { font-size: .9rem; }
.facts span { white-space: nowrap; }
.facts span:not(:last-child)::after { content: "·"; margin: 0 .5em; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(11.8rem, 1fr)); gap: .8rem;
  margin: 1.1rem 0 .6rem;
}
.tile { background: var(--soft); border: 1px solid var(--rule); border-radius: .6rem; padding: .8rem .95rem .75rem; }
.tile h3 { font-weight: 600; color: var(--muted); font-size: .92rem; }
.tile .big { font-size: 1.95rem; font-weight: 650; line-height: 1.15; letter-spacing: -.015em; margin: 0 0 .45rem; }
.tile dl {
  display: grid; grid-template-columns: auto minmax(0, 1fr); gap: .1rem .5rem; margin: 0; font-size: .84rem;
}
.tile dt { color: var(--muted); white-space: nowrap; }
.tile dd { margin: 0; text-align: right; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.tile .big, .tile dd, table, .plot text { font-variant-numeric: tabular-nums; }
.panels {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem 2rem;
  margin-top: 1rem;
}
figure { margin: 0; min-width: 0; break-inside: avoid; }
.plot { display: block; width: 100%; max-width: 36rem; height: auto; overflow: visible; }
.plot text { fill: var(--ink); font-size: 13px; }
.plot .end { text-anchor: end; } .plot .mid { text-anchor: middle; }
.plot text.name, .plot text.quiet { fill: var(--muted); }
.plot .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
.plot path { fill: none; } .plot .window { overflow: hidden; }
.plot .grid { stroke: var(--rule); stroke-width: 1; } .plot .axis { stroke: var(--muted); stroke-width: 1; }
.plot .curve { stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.plot .first { stroke: var(--first); } .plot .second { stroke: var(--second); stroke-dasharray: 6 4; }
.plot text.first { fill: var(--first); stroke: none; font-weight: 600; }
.plot text.second { fill: var(--second); stroke: none; font-weight: 600; }
.plot .level, .plot .diagonal {
  stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 2 4; stroke-linecap: round;
}
.plot .mark { stroke: var(--paper); stroke-width: 1; stroke-dasharray: none; }
.plot .mark.first { fill: var(--first); } .plot .mark.second { fill: var(--second); }
.plot .mark.open { fill: var(--fill); stroke: var(--first); stroke-width: 1.3; }
.plot .mark.worst { fill: var(--second); stroke: var(--paper); }
.plot .ring { fill: none; stroke: var(--ink); stroke-width: 1.4; }
.plot .hit { fill: transparent; } .plot .hit:hover { fill: var(--ink); }
.plot .cloud { stroke: var(--first); stroke-width: 4; stroke-linecap: round; opacity: .55; }
.plot .bar { fill: var(--fill); } .plot .column { fill: var(--first); opacity: .75; }
.plot .whisker { stroke: var(--ink); stroke-width: 1.5; }
.plot .whisker.thin { stroke: var(--muted); stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
td, thead th { text-align: right; } th:first-child { text-align: left; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tbody th { font-weight: 500; white-space: normal; min-width: 7rem; }
thead th { background: var(--paper); color: var(--muted); font-weight: 600; border-bottom: 1px solid var(--muted); }
.scroll { overflow: auto; max-height: 38rem; margin-top: 1rem; border: 1px solid var(--rule); border-radius: .5rem; }
.scroll thead th {
  position: sticky; top: 0; padding: 0; box-shadow: inset 0 -1px var(--muted); white-space: normal;
  vertical-align: bottom;
}
.scroll thead button { all: unset; box-sizing: border-box; width: 100%; padding: .45rem .6rem; cursor: pointer; }
.scroll .many th, .scroll .many td { padding: .3rem .4rem; } .scroll .many thead th { padding: 0; }
.scroll .many thead button { padding: .45rem .4rem; }
.scroll .many .meter { width: 2.4rem; margin-right: .3rem; } .scroll .many .beside { min-width: 3.4em; }
.scroll .most { font-size: .8rem; } .scroll .most .meter { display: none; }
.scroll .most th, .scroll .most td { padding: .3rem .3rem; }
.scroll .most thead th { padding: 0; } .scroll .most thead button { padding: .45rem .3rem; }
.scroll thead button:focus-visible { outline: 2px solid var(--first); outline-offset: -3px; }
.scroll thead button::after { content: "\\2195"; display: inline-block; width: 1em; text-align: right; opacity: .4; }
[aria-sort] button { color: var(--ink); }
.scroll thead [aria-sort=ascending] button::after { content: "\\25B2"; font-size: .7em; opacity: 1; }
.scroll thead [aria-sort=descending] button::after { content: "\\25BC"; font-size: .7em; opacity: 1; }
tr.bad > * { background: var(--tint); } tr.own > * { background: var(--soft); }
tbody tr:last-child > * { border-bottom: 0; }
.tag {
  color: var(--second); font-size: .78rem; font-weight: 600; border: 1px solid; border-radius: 1em;
  padding: 0 .5em;
}
.meter {
  width: 4.5rem; height: .5rem; margin-right: .6rem; vertical-align: middle; background: var(--soft);
  outline: 1px solid var(--rule);
}
.beside { display: inline-block; min-width: 4.2em; }
svg.meter .fill { fill: var(--first); }
.binned { font-size: .9rem; width: auto; }
.binned td, .binned th { padding: .28rem .55rem; }
.binned tbody th { min-width: 0; white-space: nowrap; }
.binned thead th { white-space: normal; vertical-align: bottom; }
.fits { overflow-x: auto; margin-bottom: .5rem; }
details { margin-top: 1rem; } summary { cursor: pointer; font-weight: 600; }
pre {
  background: var(--soft); border: 1px solid var(--rule); border-radius: .5rem; padding: .9rem 1rem;
  overflow-x: auto; font-size: .85rem; line-height: 1.45;
}
footer { margin-top: 2.5rem; color: var(--muted); font-size: .85rem; }
.sideways { display: none; margin-bottom: 0; }
@media (max-width: 66rem) { .scroll .many { font-size: .85rem; } .scroll .many .meter { display: none; } }
@media screen and (max-width: 62rem) { .sideways { display: block; } }
@media (max-width: 34rem) {
  main { padding: 1.3rem .9rem 2rem; } .plot text { font-size: 14px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .6rem; } .tile:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .tile { padding: .65rem .7rem; } .tile .big { font-size: 1.55rem; } .tile dl { font-size: .78rem; }
  table { font-size: .85rem; } th, td { padding: .3rem .45rem; } .meter { display: none; }
  .binned { font-size: .8rem; } .binned td, .binned th { padding: .25rem .3rem; }
}
@page { margin: 14mm; }
@media print {
  :root { color-scheme: light; font-size: 70%; } body { font-size: 9.5pt; } main { max-width: none; padding: 0; }
  .scroll { max-height: none; overflow: visible; } .scroll thead th { position: static; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }
  .panels { grid-template-columns: 1fr 1fr; } tr, .tile { break-inside: avoid; } h2 { break-after: avoid; }
  .scroll thead button::after { content: none; }
}
"""

#: Sorting by a click on a column's head (missing values stay last), and opening what is folded before printing.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const names = column === 0, missing = cell => !names && cell.dataset.v === undefined;
    const rows = [...body.rows];
    rows.sort((one, two) => {
      const a = one.cells[column], b = two.cells[column];
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const order = names
        ? a.textContent.localeCompare(b.textContent, undefined, {numeric: true})
        : a.dataset.v - b.dataset.v;
      return down ? -order : order;
    });
    body.append(...rows);
  }));
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
"""


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """A page made of these parts; ``style`` is added to the style sheet."""
    # Nothing may be loaded, and no script may run but ours, whatever a client or a setting is called.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = (
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>"
    )
    body = f"<main>\n{chr(10).join(filter(None, parts))}\n</main>\n<script>{SCRIPT}</script>"
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def figure(title: str, drawing: str, read: str) -> str:
    """A drawing with its heading and how to read it."""
    return f"<figure><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(read)}</figcaption></figure>"
