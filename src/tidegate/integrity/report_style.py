"""The look of an audit's page: colours for light and dark, and what becomes of tables on a phone."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { --ink: #1d2730; --pale: #5b6771; --line: #e1e6ea; --paper: #ffffff; --band: #f5f7f9;
  --good: #1f7a4d; --good-back: #e7f5ed; --bad: #b3261e; --bad-back: #fdecea;
  --unsure: #8a5a00; --unsure-back: #fdf3df; --bar: #2f6f9f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8edf2; --pale: #9aa7b3; --line: #2b343d; --paper: #14191f; --band: #1a2128;
    --good: #7bd3a4; --good-back: #15302a; --bad: #ff9b91; --bad-back: #3a1b1a;
    --unsure: #f2c46d; --unsure-back: #352a14; --bar: #5aa2d6; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
header p { margin: .2rem 0 1rem; color: var(--pale); }
code { font: .92em ui-monospace, monospace; }
.health { font-size: 1.1rem; font-weight: 600; padding: .9rem 1.1rem; border-radius: .5rem; margin: 0;
  border-left: .35rem solid; }
.health.good { color: var(--good); background: var(--good-back); }
.health.bad { color: var(--bad); background: var(--bad-back); }
.health.unsure { color: var(--unsure); background: var(--unsure-back); }
.shares { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem 2rem; }
.share { display: grid; grid-template-columns: 1fr auto; gap: .2rem 1rem; align-content: start; }
.share .said { color: var(--pale); font-variant-numeric: tabular-nums; }
.share .bar { grid-column: 1 / -1; height: .55rem; border-radius: .3rem; background: var(--line); overflow: hidden; }
.share .bar i { display: block; height: 100%; background: var(--bar); }
.share .evidence { grid-column: 1 / -1; color: var(--pale); font-size: .9em; }
.table { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .93em; overflow-wrap: normal; }
th, td { text-align: left; padding: .4rem .7rem; vertical-align: top; }
th { color: var(--pale); font-weight: 600; border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--line); }
tbody tr:nth-child(even) { background: var(--band); }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; } td.none { color: var(--pale); }
td.wrong { color: var(--bad); font-weight: 600; }
td[data-label="producer"] { font: .9em ui-monospace, monospace; min-width: 12em; overflow-wrap: anywhere; }
td[data-label="reason"], td[data-label="to know"], td[data-label="first offsets"] {
  min-width: 12rem; overflow-wrap: anywhere; }
ol { padding: 0; margin: 0; list-style: none; display: grid; gap: .6rem; }
ol > li { border: 1px solid var(--line); border-left: .3rem solid var(--unsure); border-radius: .5rem;
  padding: .6rem .9rem; }
ol > li.fault { border-left-color: var(--bad); } ol > li.fault b { color: var(--bad); }
ol p { margin: .3rem 0 0; } .severity { color: var(--pale); } .place { display: block; font-size: .93em; }
ol p:last-child { color: var(--pale); }
ul { margin: 0; padding-left: 1.2rem; } summary { cursor: pointer; margin-top: .6rem; }
@media (max-width: 44rem) {
  body { margin: 1rem auto; }
  .table { border: 0; overflow: visible; } thead { position: absolute; left: -9999px; }
  table, tbody, tr, td { display: block; }
  tr { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; margin-bottom: .7rem; }
  tr.bad { border-left: .3rem solid var(--bad); }
  tbody tr + tr td { border-top: 0; }
  td, td.number { display: flex; justify-content: space-between; gap: 1rem; padding: .15rem 0; text-align: right; }
  td[data-label] { min-width: 0; }
  td::before { content: attr(data-label); flex: none; color: var(--pale); font: 400 .93rem system-ui, sans-serif; }
  td.none { display: none; }
}
@media print { body { margin: 0; max-width: none; } ol > li, tr { break-inside: avoid; } }
"""
