"""A simulation's timeline as one HTML file: no script or style from outside; hovering tells what was running.

The page holds the numbers as JSON and draws them on canvases with a few lines of script of its own.
"""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.flows.views.timeline_png import engine_rows
from rollflow.tasks.simulation.records import Span
from rollflow.tasks.simulation.timeline import Timeline

ROWS = 256  # engines, or groups of neighbours: more are lines too thin to point at


def draw_html(timeline: Timeline, title: str, path: Path) -> None:
    """Write the page to `path`."""
    # "<" would let a title or a number end the script's element.
    data = json.dumps(_numbers(timeline), separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(PAGE.replace("{{title}}", html.escape(title)).replace("{{data}}", data))


def _numbers(timeline: Timeline) -> dict[str, Any]:
    """What the page shows; occupancy in 256 steps, as base64."""
    rows = engine_rows(timeline, ROWS)
    levels = np.clip(np.rint(rows * 255), 0, 255).astype(np.uint8)
    return {
        "bin": timeline.bin_seconds,
        "bins": rows.shape[1],
        "rows": rows.shape[0],
        "engines": len(timeline.engines),
        "slots": timeline.slots,
        "occupancy": base64.b64encode(levels.tobytes()).decode(),
        "rewards": [round(float(value), 2) for value in timeline.rewards],
        "steps": _spans(timeline.steps),
        "updates": _spans(timeline.updates),
    }


def _spans(spans: Any) -> list[tuple[float, float, int]]:
    found: list[Span] = list(spans)
    return [(round(span.began, 4), round(span.ended, 4), span.version) for span in found]


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{title}}</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #1e293b; background: #fff }
  h1 { font-size: 18px; margin: 0 0 4px } p { margin: 0 0 12px; color: #64748b }
  .row { display: grid; grid-template-columns: 110px 1fr; align-items: center; margin-bottom: 6px }
  .row span { color: #475569 } canvas { width: 100%; display: block; border: 1px solid #e2e8f0 }
  #tip { position: fixed; pointer-events: none; background: #0f172a; color: #f8fafc; padding: 6px 9px;
         border-radius: 6px; font-size: 12px; white-space: pre; visibility: hidden }
</style></head><body>
<h1>{{title}}</h1>
<p>Dark is busy, white is a bubble; violet: the engines take a new version. Point at anything to see what ran. Drag to
look closer, double-click for all of it.</p>
<div class="row"><span id="count"></span><canvas id="engines"></canvas></div>
<div class="row"><span>learner</span><canvas id="learner"></canvas></div>
<div class="row"><span>verdicts<br>under way</span><canvas id="rewards"></canvas></div>
<div class="row"><span>slots busy</span><canvas id="slots"></canvas></div>
<div class="row"><span></span><canvas id="axis" style="border:0"></canvas></div>
<div id="tip"></div>
<script>
const D = {{data}};
const occupancy = Uint8Array.from(atob(D.occupancy), c => c.charCodeAt(0));
const total = D.bin * D.bins, mean = new Float64Array(D.bins);
for (let b = 0; b < D.bins; b++) {
  for (let r = 0; r < D.rows; r++) mean[b] += occupancy[r * D.bins + b] / 255 / D.rows;
}
let from = 0, to = total, dragged = null;
const heights = { engines: Math.min(512, Math.max(60, D.rows * (D.rows > 64 ? 4 : 12))),
                  learner: 34, rewards: 60, slots: 60, axis: 24 };
const canvas = Object.fromEntries(Object.keys(heights).map(id => [id, document.getElementById(id)]));
document.getElementById("count").textContent =
  D.engines + " engines" + (D.rows < D.engines ? " in " + D.rows + " rows" : "");

function context(id) {
  const c = canvas[id], scale = window.devicePixelRatio || 1, width = c.clientWidth;
  c.style.height = heights[id] + "px";
  c.width = width * scale; c.height = heights[id] * scale;
  const g = c.getContext("2d");
  g.scale(scale, scale);
  return [g, width, heights[id]];
}
function shade(share) {  // white to dark blue
  const mix = (a, b) => Math.round(a + (b - a) * share);
  return `rgb(${mix(255, 8)},${mix(255, 48)},${mix(255, 107)})`;
}
function draw() {
  const x = (t, w) => (t - from) / (to - from) * w;
  const first = Math.max(0, Math.floor(from / D.bin)), last = Math.min(D.bins, Math.ceil(to / D.bin));
  {
    const [g, w, h] = context("engines");
    for (let r = 0; r < D.rows; r++) for (let b = first; b < last; b++) {
      const level = occupancy[r * D.bins + b];
      if (!level) continue;
      g.fillStyle = shade(level / 255);
      const left = x(b * D.bin, w), y = r * h / D.rows;
      g.fillRect(left, y, x((b + 1) * D.bin, w) - left + 0.5, h / D.rows - (D.rows <= 64 ? 1 : 0));
    }
    updates(g, w, h, x);
  }
  {
    const [g, w, h] = context("learner");
    g.textAlign = "center"; g.textBaseline = "middle"; g.font = "11px system-ui";
    for (const [began, ended, version] of D.steps) {
      const left = x(began, w), wide = x(ended, w) - left;
      g.fillStyle = version % 2 ? "#fb923c" : "#c2410c"; g.fillRect(left, 0, Math.max(wide, 0.5), h);
      if (wide > 24) { g.fillStyle = "#fff"; g.fillText("v" + version, left + wide / 2, h / 2); }
    }
    updates(g, w, h, x);
  }
  area("rewards", D.rewards, Math.max(1, ...D.rewards), "#15803d", first, last, x);
  area("slots", mean, 1, "#3b82f6", first, last, x);
  const [g, w] = context("axis");
  g.fillStyle = "#475569"; g.font = "11px system-ui";
  for (let i = 0; i <= 8; i++) {
    g.textAlign = i == 0 ? "left" : i == 8 ? "right" : "center";
    g.fillText(seconds(from + (to - from) * i / 8), w * i / 8, 14);
  }
}
function area(id, values, top, colour, first, last, x) {
  const [g, w, h] = context(id);
  g.fillStyle = colour;
  for (let b = first; b < last; b++) {
    const left = x(b * D.bin, w), high = values[b] / top * h;
    g.fillRect(left, h - high, x((b + 1) * D.bin, w) - left + 0.5, high);
  }
  updates(g, w, h, x);
}
function updates(g, w, h, x) {
  g.fillStyle = "rgba(124,58,237,.45)";
  for (const [began, ended] of D.updates) {
    g.fillRect(x(began, w), 0, Math.max(1, x(ended, w) - x(began, w)), h);
  }
}
function seconds(t) { return t.toFixed(to - from < 20 ? 2 : 0) + " s"; }
function running(t, id, share) {
  const b = Math.min(D.bins - 1, Math.max(0, Math.floor(t / D.bin)));
  const step = D.steps.find(s => s[0] <= t && t < s[1]), update = D.updates.find(u => u[0] <= t && t < u[1]);
  const held = D.updates.filter(u => u[1] <= t).pop();
  const lines = [seconds(t)];
  if (id == "engines") {
    const row = Math.min(D.rows - 1, Math.floor(share * D.rows)), level = occupancy[row * D.bins + b] / 255;
    const per = D.engines / D.rows;
    const one = Math.floor(row * per), end = Math.floor((row + 1) * per) - 1;
    lines.push((end > one ? `engines ${one} to ${end}` : `engine ${one}`) +
               `: ${(level * D.slots).toFixed(1)} of ${D.slots} slots busy`);
  }
  lines.push(`all engines: ${(mean[b] * 100).toFixed(0)} % of the slots busy`);
  lines.push(update ? `taking version ${update[2]}` : held ? `engines hold version ${held[2]}` : "no version yet");
  lines.push(step ? `learner trains version ${step[2]} (${(step[1] - step[0]).toFixed(2)} s)` : "learner waits");
  lines.push(`${D.rewards[b].toFixed(1)} verdicts under way`);
  return lines.join("\\n");
}
const tip = document.getElementById("tip");
for (const [id, c] of Object.entries(canvas)) {
  const at = e => from + (to - from) * (e.clientX - c.getBoundingClientRect().left) / c.clientWidth;
  c.addEventListener("mousemove", e => {
    const box = c.getBoundingClientRect();
    tip.textContent = running(at(e), id, (e.clientY - box.top) / box.height);
    tip.style.visibility = "visible";
    tip.style.left = Math.min(e.clientX + 14, innerWidth - 280) + "px"; tip.style.top = e.clientY + 14 + "px";
  });
  c.addEventListener("mouseleave", () => tip.style.visibility = "hidden");
  c.addEventListener("mousedown", e => { dragged = at(e); e.preventDefault(); });
  c.addEventListener("mouseup", e => {
    const [a, b] = [dragged, at(e)].sort((p, q) => p - q);
    if (dragged !== null && b - a > (to - from) / 100) { from = Math.max(0, a); to = Math.min(total, b); draw(); }
    dragged = null;
  });
  c.addEventListener("dblclick", () => { from = 0; to = total; draw(); });
}
addEventListener("resize", draw);
draw();
</script></body></html>
"""
