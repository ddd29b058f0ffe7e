"""The page's style and script, and the policy that lets a browser run these two texts and nothing else."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

RENEW_S = 2  # by the script
RELOAD_S = 5  # without a script
CROWDED_RELOAD_S = 30  # while as many watch as may

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2024; --soft: #5b6570; --line: #d9dee3;
  --card: #f5f7f9;
  --bad: #b3151f; --bad-bg: #fdecec; --warn: #7a5200; --warn-bg: #fff4d6; --good: #12652f; --good-bg: #e6f5ea;
  --link: #0b57a4; --gap: #e3e7eb;
  --s0: #1f6fc0; --s1: #d9730d; --s2: #c62f3c; --s3: #2b8a57; --s4: #8250c4; --s5: #b08800; --s6: #0e8c94;
  --s7: #7d8793; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --fg: #e6e9ec; --soft: #a0a9b2; --line: #363d44;
  --card: #1d2126; --bad: #ff9a94; --bad-bg: #46191c; --warn: #ffd479; --warn-bg: #3d2f0c; --good: #8fe0a8;
  --good-bg: #143322; --link: #84bdf7; --gap: #2b3138;
  --s0: #5aa5f0; --s1: #f2994a; --s2: #f0616d; --s3: #56c08a; --s4: #b592ec; --s5: #e0bb3c; --s6: #3fc1c9;
  --s7: #98a2ad; } }
* { box-sizing: border-box; }
body { background: var(--bg); color: var(--fg); font: 14px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 84em; padding: 1em; }
a { color: var(--link); }
h1 { font-size: 1.15em; margin: 0 0 .2em; overflow-wrap: anywhere; }
h2 { font-size: 1.05em; margin: 1.6em 0 .4em; }
p { margin: .3em 0; }
.note, .about { color: var(--soft); }
.about { font-size: .92em; overflow-wrap: anywhere; }
.verdict { border-left: .4em solid; border-radius: .3em; font-size: 1.2em; font-weight: 600; margin: .7em 0;
  padding: .6em .8em; overflow-wrap: anywhere; }
.bad { background: var(--bad-bg); color: var(--bad); } .warn { background: var(--warn-bg);
  color: var(--warn); }
.good { background: var(--good-bg); color: var(--good); }
td.bad, td .bad { background: none; font-weight: 600; }
.warnings { list-style: none; margin: .7em 0; padding: 0; }
.warnings li { border-left: .4em solid var(--warn); border-radius: .3em; background: var(--warn-bg);
  margin: .4em 0; overflow-wrap: anywhere; padding: .5em .8em; }
.warnings b { color: var(--warn); }
.tiles { display: grid; gap: .6em; grid-template-columns: repeat(auto-fit, minmax(9.5em, 1fr));
  margin: .8em 0; }
.tile { background: var(--card); border-radius: .4em; padding: .5em .8em; }
.tile b { display: block; font-size: 1.45em; font-variant-numeric: tabular-nums; font-weight: 600; }
.tile span { color: var(--soft); }
.tile.bad b, .tile.bad span { color: var(--bad); }
.charts { display: grid; gap: 1em 1.5em;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 32em), 1fr)); }
figure { margin: .4em 0; min-width: 0; }
figcaption { font-weight: 600; }
.keys { display: flex; flex-wrap: wrap; font-size: .88em; font-weight: 400; gap: .1em 1em;
  min-height: 1.5em; }
.key i { border-radius: .15em; display: inline-block; height: .75em; margin-right: .35em; width: .75em; }
.key b { font-weight: 600; }
.plot { border: 1px solid var(--line); position: relative; }
.plot svg { display: block; height: 8em; width: 100%; }
.plot .top { background: var(--bg); color: var(--soft); font-size: .85em; left: .3em; opacity: .9;
  padding: 0 .2em; position: absolute; top: .1em; }
.axis { color: var(--soft); display: flex; font-size: .85em; justify-content: space-between; }
.grid { fill: none; stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.gap { background: var(--gap); fill: var(--gap); }
.line { fill: none; stroke-linejoin: round; stroke-width: 2; vector-effect: non-scaling-stroke; }
svg.bar { display: block; height: .8em; min-width: 8em; width: 100%; }
i.s0 { background: var(--s0); } i.s1 { background: var(--s1); } i.s2 { background: var(--s2); }
i.s3 { background: var(--s3); } i.s4 { background: var(--s4); } i.s5 { background: var(--s5); }
i.s6 { background: var(--s6); } i.s7 { background: var(--s7); }
.fill.s0 { fill: var(--s0); } .fill.s1 { fill: var(--s1); } .fill.s2 { fill: var(--s2); }
.fill.s3 { fill: var(--s3); } .fill.s4 { fill: var(--s4); } .fill.s5 { fill: var(--s5); }
.fill.s6 { fill: var(--s6); } .fill.s7 { fill: var(--s7); }
.line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); }
.line.s3 { stroke: var(--s3); } .line.s4 { stroke: var(--s4); } .line.s5 { stroke: var(--s5); }
.line.s6 { stroke: var(--s6); } .line.s7 { stroke: var(--s7); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 40em; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .25em 1em .25em 0; text-align: left;
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
td { overflow-wrap: break-word; }
td.word { white-space: nowrap; }
.facts th { width: 14em; }
td:not(.num) { min-width: 3em; } .num + td:not(.num), .num + th:not(.num) { padding-left: .8em; }
.num { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
.live { border-radius: .3em; margin: .4em 0; padding: .2em .6em; }
.live:empty { display: none; }
summary { cursor: pointer; }
"""

SCRIPT = """
"use strict";
const random = crypto.getRandomValues(new Uint8Array(8));
const id = Array.from(random, n => n.toString(16).padStart(2, "0")).join("");
const note = document.getElementById("live");
let answered = new Date();
const asked = () => ({cache: "no-store", signal: AbortSignal.timeout(5000)});
async function renew() {
  if (!document.hidden && getSelection().isCollapsed) {
    try {
      const reply = await fetch("/fragment?watcher=" + id, asked());
      if (reply.status === 503) {
        note.className = "live warn";
        note.textContent = "As many watch this page as may: it is renewed each CROWDED_RELOAD_S s.";
        setTimeout(() => location.reload(), CROWDED_RELOAD_S * 1000);
        return;
      }
      if (!reply.ok) throw new Error(reply.status);
      const fresh = new DOMParser().parseFromString(await reply.text(), "text/html").querySelector("main");
      const old = document.querySelector("main");
      for (const part of old.querySelectorAll("details[open]")) {
        const same = fresh.querySelector("#" + part.id);
        if (same) same.open = true;
      }
      const scrolled = Array.from(old.querySelectorAll(".scroll"), part => part.scrollLeft);
      old.replaceWith(fresh);
      fresh.querySelectorAll(".scroll").forEach((part, index) => { part.scrollLeft = scrolled[index] || 0; });
      document.title = fresh.dataset.title;
      note.textContent = "";
      answered = new Date();
    } catch (error) {
      note.className = "live bad";
      note.textContent = "The daemon does not answer. What stands below is of " +
        answered.toISOString().slice(11, 19) + " UTC.";
    }
  }
  setTimeout(renew, RENEW_S * 1000);
}
setTimeout(renew, RENEW_S * 1000);
""".replace("CROWDED_RELOAD_S", str(CROWDED_RELOAD_S)).replace("RENEW_S", str(RENEW_S))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# No address but this one, no other script or style, no form, no frame around it.
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; connect-src 'self'; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
