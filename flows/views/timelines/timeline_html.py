"""Writes a simulation's timeline as one HTML file without external scripts or styles. Pointing at the timeline shows
what was running.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.flows.views.timelines.timeline import BUSY, LEARNER, UPDATE, Drawing
from rollflow.tasks.simulation.records import Span

ROWS = 256  # Largest number of rows on the page. More rows would be too thin to point at with a mouse.


def draw_html(drawing: Drawing, path: Path) -> None:
    """Write the timeline as an HTML page to `path`."""
    # "<" is escaped, because a "</script>" in the title would end the script element.
    data = json.dumps(_numbers(drawing), separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(PAGE.replace("{{title}}", html.escape(drawing.title)).replace("{{data}}", data))


def _numbers(drawing: Drawing) -> dict[str, Any]:
    """Return the drawing as JSON values. The shares of busy request slots are integers from 0 to 255, in base64."""
    rows, bins = drawing.rows_RB.shape
    levels = np.clip(np.rint(drawing.rows_RB * 255), 0, 255).astype(np.uint8)
    curves = [asdict(curve) | {"values_B": np.round(curve.values_B, 2).tolist()} for curve in drawing.curves]
    return {
        "bin": drawing.bin_seconds,
        "bins": bins,
        "rows": rows,
        "label": drawing.label,
        "engines": drawing.engines,
        "slots": drawing.slots,
        "occupancy": base64.b64encode(levels.tobytes()).decode(),
        "curves": curves,
        "steps": _spans(drawing.steps),
        "updates": _spans(drawing.updates),
        "colours": {"busy": BUSY, "learner": LEARNER, "update": UPDATE},
    }


def _spans(spans: Sequence[Span]) -> list[tuple[float, float, int]]:
    return [(round(span.began, 4), round(span.ended, 4), span.version) for span in spans]


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{title}}</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #1e293b; background: #fff }
  h1 { font-size: 18px; margin: 0 0 4px } p { margin: 0 0 12px; color: #64748b }
  .row { display: grid; grid-template-columns: 110px 1fr; align-items: center; margin-bottom: 6px }
  .row span { color: #475569; white-space: pre }
  canvas { width: 100%; display: block; border: 1px solid #e2e8f0 } #axis { border: 0 }
  #tip { position: fixed; pointer-events: none; background: #0f172a; color: #f8fafc; padding: 6px 9px;
         border-radius: 6px; font-size: 12px; white-space: pre; visibility: hidden }
</style></head><body>
<h1>{{title}}</h1>
<p>Dark is busy, white is a bubble; violet: the engines load a new version. Point at anything to see what ran. Drag to
zoom in, double-click to zoom out.</p>
<div id="rows"></div>
<div id="tip"></div>
<script>
const D = {{data}};
const occupancy = Uint8Array.from(atob(D.occupancy), c => c.charCodeAt(0));
const total = D.bin * D.bins, stops = D.colours.busy.map(c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16)));
let from = 0, to = total, dragged = null;
const heights = {}, canvas = {};
function row(id, label, height) {
  const line = document.createElement("div"), words = document.createElement("span");
  line.className = "row"; words.textContent = label; heights[id] = height;
  canvas[id] = document.createElement("canvas"); canvas[id].id = id;
  line.append(words, canvas[id]); document.getElementById("rows").append(line);
}
row("engines", D.label, Math.min(512, Math.max(60, D.rows * (D.rows > 64 ? 4 : 12))));
row("learner", "learner", 34);
D.curves.forEach((c, i) => row("curve" + i, c.label, 60));
row("axis", "", 24);

function context(id) {
  const c = canvas[id], scale = window.devicePixelRatio || 1, width = c.clientWidth;
  c.style.height = heights[id] + "px";
  c.width = width * scale; c.height = heights[id] * scale;
  const g = c.getContext("2d");
  g.scale(scale, scale);
  return [g, width, heights[id]];
}
function shade(share) {
  const place = share * (stops.length - 1), left = Math.min(Math.floor(place), stops.length - 2);
  return `rgb(${stops[left].map((a, i) => Math.round(a + (stops[left + 1][i] - a) * (place - left)))})`;
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
      g.fillStyle = D.colours.learner[version % 2]; g.fillRect(left, 0, Math.max(wide, 0.5), h);
      if (wide > 24) { g.fillStyle = "#fff"; g.fillText("v" + version, left + wide / 2, h / 2); }
    }
    updates(g, w, h, x);
  }
  D.curves.forEach((c, i) => area("curve" + i, c, first, last, x));
  const [g, w] = context("axis");
  g.fillStyle = "#475569"; g.font = "11px system-ui";
  for (let i = 0; i <= 8; i++) {
    g.textAlign = i == 0 ? "left" : i == 8 ? "right" : "center";
    g.fillText(seconds(from + (to - from) * i / 8), w * i / 8, 14);
  }
}
function area(id, curve, first, last, x) {
  const [g, w, h] = context(id);
  g.fillStyle = curve.colour;
  for (let b = first; b < last; b++) {
    const left = x(b * D.bin, w), high = curve.values_B[b] / curve.top * h;
    g.fillRect(left, h - high, x((b + 1) * D.bin, w) - left + 0.5, high);
  }
  updates(g, w, h, x);
}
function updates(g, w, h, x) {
  g.fillStyle = D.colours.update + "73";  // the last two: how opaque, of ff
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
  D.curves.forEach(c => lines.push(c.sentence.replace("{}", c.values_B[b].toFixed(c.digits))));
  lines.push(update ? `loading version ${update[2]}` : held ? `engines have version ${held[2]}` : "no version yet");
  lines.push(step ? `learner trains version ${step[2]} (${(step[1] - step[0]).toFixed(2)} s)` : "learner waits");
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
