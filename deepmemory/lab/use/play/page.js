"use strict";
const at = (id) => document.getElementById(id);
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function made(name, attributes = {}, text = "") {
  const element = document.createElement(name);
  Object.assign(element, attributes);
  element.append(text);
  return element;
}

function drawn(name, attributes, text = "") {
  const element = document.createElementNS(at("curves").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(text);
  return element;
}

async function ask(address, request) {
  let answer;
  try {
    const how = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) };
    answer = await fetch(address, request === undefined ? {} : how);
  } catch {
    throw new Error("No answer. Is dmu play still running?");
  }
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

/* Run an action when a form is submitted: its button is disabled meanwhile, errors are shown below it. */
function onSubmit(form, error, action) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button.main");
    button.disabled = true;
    error.textContent = "";
    try {
      await action();
    } catch (problem) {
      error.textContent = problem.message;
    }
    button.disabled = false;
  });
}

function limit(input, bounds, value = bounds.default) {
  Object.assign(input, { min: bounds.low, max: bounds.high, step: bounds.whole ? 1 : "any", value });
}

const CHANCE = 1 / 24; // the loss of a constant answer: the variance of the target
const LEARNED = 0.01;
let shown = { number: 0, version: 0, epochs: 0, curves: {} };
let started = 0; // number of the training that was started last
let following = false;

function addCell(name, defaults, counts, bounds) {
  const chosen = made("input", { type: "checkbox", id: `use-${name}`, checked: true });
  const label = made("label", { htmlFor: chosen.id, className: `name ${name}` }, name.toUpperCase());
  const weights = made("output", { id: `weights-${name}` });
  const fields = {};
  for (const [field, what] of [["hidden", "state size"], ["lr", "learning rate"], ["start", "start bias"]]) {
    fields[field] = made("input", { type: "number", id: `${field}-${name}`, required: true });
    fields[field].setAttribute("aria-label", `${what} of the ${name.toUpperCase()}`);
    limit(fields[field], bounds[field], defaults[field]);
  }
  weights.setAttribute("aria-label", `weights of the ${name.toUpperCase()}`);
  const count = () => (weights.textContent = counts[fields.hidden.valueAsNumber - 1] ?? "");
  fields.hidden.addEventListener("input", count);
  count();
  const row = made("tr");
  for (const content of [[chosen, " ", label], [fields.hidden], [weights], [fields.lr], [fields.start]]) {
    const cell = made("td", { className: content[0] === weights ? "number" : "" });
    cell.append(...content);
    row.append(cell);
  }
  at("cells").append(row);
}

function trainingRequest(names) {
  const cells = {};
  for (const name of names) {
    if (at(`use-${name}`).checked) {
      const [hidden, lr, start] = ["hidden", "lr", "start"].map((field) => at(`${field}-${name}`).valueAsNumber);
      cells[name] = { hidden, lr, start };
    }
  }
  const [runs, length, epochs] = ["runs", "length", "epochs"].map((id) => at(id).valueAsNumber);
  return { cells, runs, length, epochs };
}

async function follow() {
  if (following) return;
  following = true;
  try {
    let state = "running";
    while (state === "running" || shown.number < started) {
      const news = await ask(`training?number=${shown.number}&version=${shown.version}&epochs=${shown.epochs}`);
      show(news);
      state = news.state;
    }
  } catch (problem) {
    at("training-error").textContent = problem.message;
    at("stop").disabled = true;
  }
  following = false;
}

function show(news) {
  if (news.number !== shown.number) {
    shown = { number: news.number, epochs: 0, curves: {} };
    for (const cell of news.cells) shown.curves[cell] = {};
    at("gates-figure").hidden = !news.cells.includes("dmu");
  }
  shown.version = news.version;
  shown.epochs += news.epochs.length;
  for (const { cell, epoch, losses } of news.epochs) {
    for (const [seed, loss] of Object.entries(losses)) {
      (shown.curves[cell][seed] ??= []).push([epoch, loss]);
    }
  }
  at("stop").disabled = news.state !== "running";
  const words = { running: "Training", finished: "Finished", stopped: "Stopped", failed: "Failed", idle: "Not started" };
  const state = words[news.state] + (news.reason ? `: ${news.reason}.` : ".");
  if (at("training-state").textContent !== state) at("training-state").textContent = state; // read out once
  drawCurves(news.cells, news.total_epochs);
  if (news.gates) drawGates(news.gates);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/* The median of all runs at each epoch; a run that has ended counts with its last loss. */
function medians(runs) {
  const last = Math.max(0, ...runs.map((run) => run.length));
  const middle = [];
  for (let index = 0; index < last; index++) {
    const losses = runs.map((run) => run[Math.min(index, run.length - 1)][1] ?? Infinity);
    middle.push([index + 1, median(losses)]);
  }
  return middle;
}

function drawCurves(cells, epochs) {
  const all = Object.values(shown.curves).flatMap((runs) => Object.values(runs).flat());
  const losses = all.map(([, loss]) => loss).filter((loss) => loss > 0);
  const high = Math.ceil(Math.log10(Math.max(0.05, ...losses)));
  const low = Math.min(high - 2, Math.floor(Math.log10(Math.min(0.05, ...losses))));
  const [left, right, top, bottom] = [52, 628, 12, 284];
  const x = (epoch) => left + ((right - left) * epoch) / Math.max(1, epochs);
  const y = (loss) => bottom - ((bottom - top) * (Math.log10(loss) - low)) / (high - low);
  const parts = [];
  for (let power = low; power <= high; power++) {
    parts.push(drawn("line", { class: "grid", x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power) }));
    parts.push(drawn("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, `1e${power}`));
  }
  for (let tick = 0; tick <= 4; tick++) {
    const epoch = Math.round((epochs * tick) / 4);
    parts.push(drawn("text", { x: x(epoch), y: bottom + 17, "text-anchor": "middle" }, String(epoch)));
  }
  parts.push(drawn("text", { x: (left + right) / 2, y: 314, "text-anchor": "middle" }, "epoch"));
  parts.push(drawn("line", { class: "chance", x1: left, x2: right, y1: y(CHANCE), y2: y(CHANCE) }));
  const rows = [];
  const summaries = [];
  for (const cell of cells) {
    const runs = Object.values(shown.curves[cell]);
    const middle = medians(runs);
    const group = drawn("g", { class: cell });
    const line = (points, kind) => {
      const real = points.filter(([, loss]) => loss > 0 && loss < Infinity);
      const path = real.map(([epoch, loss]) => `${x(epoch).toFixed(1)} ${y(loss).toFixed(1)}`).join("L");
      if (path) group.append(drawn("path", { class: kind, d: `M${path}`, "data-points": real.length }));
    };
    for (const run of runs) line(run, "run");
    line(middle, "median");
    parts.push(group);
    if (middle.length) {
      const [epoch, loss] = middle.at(-1);
      const best = Math.min(...runs.map((run) => run.at(-1)[1] ?? Infinity));
      const row = made("tr");
      row.append(made("td", { className: `name ${cell}` }, cell.toUpperCase()));
      const learned = runs.filter((run) => run.at(-1)[1] !== null && run.at(-1)[1] < LEARNED).length;
      for (const text of [epoch, loss.toExponential(1), best.toExponential(1), `${learned} of ${runs.length}`]) {
        row.append(made("td", { className: "number" }, String(text)));
      }
      rows.push(row);
      summaries.push(`${cell.toUpperCase()} median ${loss.toExponential(1)} at epoch ${epoch}`);
    }
  }
  at("curves").replaceChildren(...parts);
  at("curves").setAttribute("aria-label", `Validation loss by epoch: ${summaries.join("; ") || "nothing yet"}`);
  at("scores").hidden = !rows.length;
  at("scores").tBodies[0].replaceChildren(...rows);
}

function colour(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const from = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return VIRIDIS[from].map((value, index) => value + (VIRIDIS[from + 1][index] - value) * (place - from));
}

function drawGates({ epoch, keep, numbers, marked, answer, target }) {
  const [units, steps] = [keep.length, numbers.length];
  const sequence = at("sequence");
  sequence.setAttribute("viewBox", `0 -1.1 ${steps} 2.2`);
  sequence.replaceChildren(
    ...numbers.map((number, step) =>
      drawn("rect", {
        x: step + 0.15, y: Math.min(0, -number), width: 0.7, height: Math.abs(number),
        class: marked.includes(step) ? "marked" : "",
      })
    )
  );
  const canvas = at("gates");
  Object.assign(canvas, { width: steps, height: units });
  const picture = new ImageData(steps, units);
  keep.forEach((unit, row) =>
    unit.forEach((share, step) => picture.data.set([...colour(share ?? 0), 255], 4 * (row * steps + step)))
  );
  canvas.getContext("2d").putImageData(picture, 0, 0);
  const all = keep.flat();
  const mean = all.reduce((sum, share) => sum + share, 0) / all.length;
  canvas.dataset.epoch = epoch;
  canvas.setAttribute("aria-label", `Gates of the DMU after epoch ${epoch}: ${mean.toFixed(2)} is kept on average`);
  const output = answer === null ? "not a number" : answer.toFixed(3);
  at("answer").textContent = `After epoch ${epoch} its output is ${output}; the target is ${target.toFixed(3)}.`;
}

/* Show the part of a section that fits: the model's, or the commands that train one. */
function showSection(section, about) {
  section.querySelector(".ready").hidden = !about.ready;
  section.querySelector(".missing").hidden = about.ready;
  if (!about.ready) {
    section.querySelector(".problem").textContent = about.problem;
    section.querySelector("pre").textContent = about.commands.join("\n");
  }
  return about.ready;
}

async function translate() {
  at("translations").hidden = true;
  const found = await ask("translate", { text: at("sentence").value, beam: at("beam").valueAsNumber });
  at("greedy").textContent = found.greedy;
  at("beamed").textContent = found.beam;
  at("unknown").replaceChildren(...found.unknown.flatMap((word) => [made("mark", {}, word), " "]));
  at("unknown").hidden = at("unknown-title").hidden = !found.unknown.length;
  at("translations").hidden = false;
}

function setUpTranslation(about, state) {
  at("language").textContent = about.language[0].toUpperCase() + about.language.slice(1);
  at("translator").textContent =
    `A ${about.cell.toUpperCase()} with a vocabulary of ${about.words} words. The sentences below are from the test set.`;
  at("sentence").maxLength = state.longest_text;
  limit(at("beam"), state.bounds.beam);
  for (const sentence of about.examples) {
    const button = made("button", { type: "button" }, sentence);
    button.addEventListener("click", () => {
      at("sentence").value = sentence;
      at("translation-form").requestSubmit();
    });
    at("examples").append(button);
  }
  onSubmit(at("translation-form"), at("translation-error"), translate);
}

const files = {};

function objectUrl(id, text, type) {
  if (files[id]) URL.revokeObjectURL(files[id]);
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  return (files[id] = URL.createObjectURL(new Blob([bytes], { type })));
}

async function compose() {
  at("music-state").textContent = "Composing.";
  const request = { tune: Number(at("tune").value) };
  for (const id of ["given", "steps", "temperature", "seed"]) request[id] = at(id).valueAsNumber;
  try {
    const music = await ask("compose", request);
    at("audio").src = at("wav").href = objectUrl("wav", music.wav, "audio/wav");
    at("midi").href = objectUrl("midi", music.midi, "audio/midi");
    drawRoll(music);
    at("composed").hidden = false;
    at("music-state").textContent = `${music.given} frames given, ${music.frames - music.given} composed.`;
  } catch (problem) {
    at("music-state").textContent = "";
    throw problem;
  }
}

function drawRoll({ notes, given, frames }) {
  const keys = notes.map(([key]) => key);
  const [low, high] = [Math.min(87, ...keys) - 1, Math.max(0, ...keys) + 1];
  const roll = at("roll");
  roll.setAttribute("viewBox", `0 0 ${frames} ${high - low + 1}`);
  const parts = [];
  const rect = (key, start, end, kind) =>
    parts.push(drawn("rect", { class: kind, x: start, y: high - key, width: Math.max(end - start - 0.1, 0.1), height: 0.9 }));
  for (const [key, start, end] of notes) {
    if (start < given) rect(key, start, Math.min(end, given), "given");
    if (end > given) rect(key, Math.max(start, given), end, "composed");
  }
  parts.push(drawn("line", { class: "border", x1: given, x2: given, y1: 0, y2: high - low + 1 }));
  parts.push(drawn("line", { class: "now", id: "now", x1: 0, x2: 0, y1: 0, y2: high - low + 1 }));
  roll.replaceChildren(...parts);
  roll.dataset.frames = frames;
  roll.setAttribute("aria-label", `Piano-roll: ${notes.length} notes, ${given} frames given, ${frames - given} composed`);
}

function movePlace() {
  const [audio, now] = [at("audio"), at("now")];
  if (now && audio.duration) {
    const place = (at("roll").dataset.frames * audio.currentTime) / audio.duration;
    now.setAttribute("x1", place);
    now.setAttribute("x2", place);
  }
  if (!audio.paused) requestAnimationFrame(movePlace);
}

function setUpMusic(about, state) {
  at("composer").textContent = `A ${about.cell.toUpperCase()} trained on ${about.music}. The tunes below are from the test set.`;
  about.frames.forEach((frames, tune) => at("tune").append(made("option", { value: tune }, `${tune}: ${frames} frames`)));
  for (const id of ["given", "steps", "temperature", "seed"]) limit(at(id), state.bounds[id]);
  at("audio").addEventListener("play", movePlace);
  at("audio").addEventListener("seeked", movePlace);
  onSubmit(at("music-form"), at("music-error"), compose);
}

async function open() {
  const state = await ask("state");
  for (const [name, cell] of Object.entries(state.cells)) addCell(name, cell, state.weights[name], state.bounds);
  for (const id of ["runs", "length", "epochs"]) limit(at(id), state.bounds[id]);
  onSubmit(at("training-form"), at("training-error"), async () => {
    started = (await ask("start", trainingRequest(Object.keys(state.cells)))).number;
    follow();
  });
  at("stop").addEventListener("click", () => ask("stop", {}).catch((problem) => (at("training-error").textContent = problem.message)));
  drawCurves([], state.bounds.epochs.default);
  if (showSection(at("translation"), state.translation)) setUpTranslation(state.translation, state);
  if (showSection(at("music"), state.music)) setUpMusic(state.music, state);
  if (state.training) follow();
  document.body.dataset.ready = "yes";
}

open().catch((problem) => (at("training-error").textContent = problem.message));
