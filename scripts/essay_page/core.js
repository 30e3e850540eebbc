// State, the address, controls and SVG. Knows nothing of the scenes.

/** What was recorded. */
const data = JSON.parse(document.getElementById("data").textContent);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Everything that the reader can choose: its first value, and the values that the address may give it. */
const choices = {};
/** What is chosen now; all values are strings, as in the address. */
const state = {};
const scenes = [];
let fromReader = false, writing = 0;

function choose(key, first, allowed) {
  choices[key] = { first, allowed };
  state[key] = first;
}

function fits(key, value) {
  const { allowed } = choices[key];
  return typeof allowed === "function" ? allowed(value) : allowed.includes(value);
}

/** Set some choices, draw the scenes that show them, and note them in the address. */
function set(changes) {
  const changed = Object.keys(changes).filter(key => key in choices && fits(key, changes[key]) && state[key] !== changes[key]);
  for (const key of changed) state[key] = changes[key];
  if (!changed.length) return;
  fromReader = true;
  for (const scene of scenes) if (scene.keys.some(key => changed.includes(key))) scene.stale = true;
  const here = scenes.filter(scene => scene.figure.contains(document.activeElement));
  drawSeen(here.length ? here : scenes);  // the reader's own scene first; its neighbours after the next frame
  requestAnimationFrame(() => setTimeout(drawSeen));
  clearTimeout(writing);
  writing = setTimeout(writeAddress, 200);
}

function writeAddress() {
  const told = Object.keys(choices).filter(key => state[key] !== choices[key].first || ["dp", "tp", "strategy", "moment"].includes(key));
  history.replaceState(null, "", "#" + told.map(key => `${key}=${encodeURIComponent(state[key])}`).join("&"));
}

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(choices)) {
    const value = found.get(key);
    state[key] = value !== null && fits(key, value) ? value : fromReader && value === null ? state[key] : choices[key].first;
  }
  for (const scene of scenes) scene.stale = true;
  const at = found.get("at"), last = scenes.findIndex(scene => scene.id === at);
  if (last < 0) return;
  for (const scene of scenes.slice(0, last + 1)) scene.near = true;  // drawn before it scrolls: then all above has its height
  drawSeen();
  document.getElementById(at).scrollIntoView({ behavior: "instant" });
}

/** Draw what is near the window and has changed; the rest waits until it comes near. */
function drawSeen(chosen = scenes) {
  for (const scene of chosen) {
    if (!scene.stale || !scene.near) continue;
    scene.stale = false;
    scene.width ||= Math.max(280, scene.stage.clientWidth || scene.stage.parentElement.clientWidth - 32);
    for (const sync of scene.controls) sync();
    scene.draw(scene.stage, scene.width);
  }
}

function scene(id, keys, build, draw) {
  const figure = document.querySelector(`#${id} figure`);
  const it = { id, keys, draw, stale: true, near: false, width: 0, controls: [], figure };
  it.stage = figure.querySelector(".stage");
  it.said = figure.querySelector(".said");
  build(it, figure.querySelector(".controls"));
  scenes.push(it);
}

function start() {
  readAddress();
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) scenes.find(each => each.figure === entry.target).near = entry.isIntersecting;
    drawSeen();
  }, { rootMargin: "300px" });
  for (const each of scenes) seen.observe(each.figure);
  addEventListener("hashchange", () => { readAddress(); drawSeen(); });
  let width = innerWidth;
  const again = () => { for (const each of scenes) { each.stale = true; each.width = 0; } drawSeen(); };
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; again(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => { for (const each of scenes) each.near = each.stale = true; drawSeen(); });
}

// Elements.

function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key in made && key !== "list" ? made[key] = value : made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

/** A row of radio buttons for a choice. `options` are pairs: value, words. */
function radios(scene, holder, key, legend, options) {
  const stops = element("div", { className: "stops" }), inputs = [];
  for (const [value, words] of options) {
    const input = element("input", { type: "radio", name: `${scene.id}-${key}`, value });
    input.addEventListener("change", () => set({ [key]: value }));
    inputs.push(input);
    stops.append(element("label", {}, input, element("span", {}, words)));
  }
  const field = element("fieldset", {}, element("legend", {}, legend), stops);
  holder.append(field);
  scene.controls.push(() => { for (const input of inputs) input.checked = input.value === state[key]; });
  return field;
}

/** A slider over the values of a choice; `values` is a function if they depend on other choices. */
function slider(scene, holder, key, words, values, say = value => value, long = false) {
  const shown = element("output"), of = () => typeof values === "function" ? values() : values;
  const input = element("input", { type: "range", min: 0, step: 1, name: `${scene.id}-${key}` });
  const label = element("label", { className: long ? "range long" : "range" }, element("span", {}, `${words} `, shown), input);
  input.addEventListener("input", () => set({ [key]: of()[+input.value] }));
  holder.append(label);
  scene.controls.push(() => {
    const all = of();
    input.max = all.length - 1;
    input.value = all.includes(state[key]) ? all.indexOf(state[key]) : all.length - 1;
    shown.value = say(state[key]);
    input.setAttribute("aria-valuetext", say(state[key]));
  });
  return input;
}

function button(holder, words, act) {
  const made = element("button", { type: "button" }, words);
  made.addEventListener("click", act);
  holder.append(made);
  return made;
}

/** A button that moves a choice from value to value; for those who want no motion, one at a press. */
function player(scene, holder, key, values, words = "Play") {
  let timer = 0;
  const stop = () => { clearInterval(timer); timer = 0; made.textContent = words; };
  const next = () => {
    const place = values.indexOf(state[key]) + 1;
    if (place < values.length) set({ [key]: values[place] });
    if (place >= values.length - 1) stop();
  };
  const made = button(holder, words, () => {
    if (timer) return stop();
    if (state[key] === values.at(-1)) set({ [key]: values[0] });
    if (calm.matches) return next();
    made.textContent = "Pause";
    next();
    timer = setInterval(next, 1100);
  });
}

// Pictures.

const SVG = "http://www.w3.org/2000/svg";

function draw(name, attributes, words) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

function picture(stage, width, height, label) {
  const made = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  stage.replaceChildren(made);
  return made;
}

function box(into, x, y, width, height, fill, more = {}) {
  return into.appendChild(draw("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), fill, ...more }));
}

/** Many boxes as one outline, which is quick to draw. */
function outline(corners) {
  return corners.map(([x, y, width, height]) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`).join("");
}

function boxes(into, corners, fill) {
  if (corners.length) into.appendChild(draw("path", { d: outline(corners), fill }));
}

function text(into, x, y, words, look = "") {
  return into.appendChild(draw("text", { x, y, class: look }, words));
}

/** Change only those parts of a drawing that differ: each change costs a layout. */
function change(drawn, attributes) {
  for (const [key, value] of Object.entries(attributes)) if (drawn.getAttribute(key) !== String(value)) drawn.setAttribute(key, value);
}

function retell(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

const colour = rank => data.colours[rank % data.colours.length];
const count = number => Number(number).toLocaleString("en");
const list = items => items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;

function quantity(number, units) {
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number >= 100 || Number.isInteger(number) ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}
const bytes = number => quantity(number, ["bytes", "kB", "MB", "GB", "TB"]);
const seconds = number => number >= 1 ? `${number.toFixed(2)} s` : `${(number * 1000).toFixed(number < .1 ? 1 : 0)} ms`;

/** Words with parts in bold, between asterisks. */
function say(scene, words) {
  scene.said.replaceChildren(...words.split("*").map((part, place) => place % 2 ? element("b", {}, part) : part));
}
