// The seven scenes. Each looks up what was recorded for the reader's choice, and draws it.

const MATRICES = Object.keys(data.shapes);
const numbers = (from, to) => Array.from({ length: to - from + 1 }, (_, place) => String(from + place));
const grid = () => data.grids[`${state.dp}x${state.tp}`];
const shape = () => data.shapes[state.matrix];
const shapeWords = name => `${name}, ${data.shapes[name].join(" × ")}`;
const MOMENTS = numbers(0, data.phases.length);
const STRATEGIES = Object.keys(data.grids["2x2"].strategies);
const MEANS = {
  replicated: "every rank gathers every matrix over tp and does all the work",
  round_robin: "the places along dp own the matrices in turn; the owner sends its update to all",
  zero1: "dp cuts one long buffer of all matrices; whoever keeps a part of a matrix works on it",
  "zero1 boundary": "as zero1, but over dp it gathers only what the cuts of the buffer divide",
  layerwise: "each matrix has one home; gradients are summed there, and new weights are sent from there",
  gram: "as layerwise, but what tp cuts is not gathered: its ranks add up a small square matrix",
  owner: "for weights that FSDP2 has cut: one rank collects a matrix, and sends each rank its piece of the update",
};

choose("dp", "2", data.dp.map(String));
choose("tp", "2", data.tp.map(String));
choose("strategy", "zero1", STRATEGIES);
choose("matrix", "o", MATRICES);
choose("moment", "0", MOMENTS);
choose("row", "17", value => Number.isInteger(+value) && +value >= 0);
choose("column", "5", value => Number.isInteger(+value) && +value >= 0);
choose("net", "2x2", Object.keys(data.networks));
choose("answers", "", value => /^(\d+(\.\d+)*)?$/.test(value));
choose("rank", "1", numbers(0, data.saboteur.ranks - 1));
choose("hit", "k1", data.saboteur.matrices);
choose("fault", "lost", Object.values(data.saboteur.faults));
choose("after", "9", numbers(0, data.saboteur.steps * data.saboteur.phases.length));
choose("input", "real", ["real", "Gaussian", "power law"]);
choose("cut", "columns", ["columns", "rows"]);
choose("pieces", "4", data.alone.cuts.map(String));
choose("ranks", "128", data.scale.ranks.map(String));
choose("link", "200mbit", ["loopback", "200mbit"]);
choose("way", "zero1", ["zero1", "owner"]);
choose("window", "1", ["1", "3"]);

/** How a matrix is drawn in a square of this side: tall and wide ones keep their character, not their scale. */
function frame(side) {
  const [rows, columns] = shape();
  return [rows < columns ? side : columns < rows ? side / 2 : side, rows > columns ? side : rows < columns ? side / 2 : side];
}

function gridControls(scene, holder, dps = data.dp, tps = data.tp) {
  slider(scene, holder, "dp", "dp =", dps.map(String));
  slider(scene, holder, "tp", "tp =", tps.map(String));
  radios(scene, holder, "matrix", "matrix", MATRICES.map(name => [name, shapeWords(name)]));
}

// 1. Who holds what?

/** The flat buffer of a tp place, cut by dp, with the matrices in it; `fill` says whose it is. */
function ruler(svg, width, top) {
  const dp = +state.dp, { length, slice, ranges } = grid().bucket, at = entry => entry / length * width, words = text(svg, 0, top - 8, "", "q");
  const slices = numbers(0, dp - 1).map(d => [box(svg, at(d * slice), top, at(slice), 24, "none", { stroke: "#1b1b1b", "stroke-width": .8 }), text(svg, at((+d + .5) * slice), top + 17, "", "on m")]);
  for (const [name, [from, to]] of Object.entries(ranges)) {
    box(svg, at(from), top + 30, at(to - from) - 1, 16, name === state.matrix ? "var(--accent)" : "var(--empty)");
    text(svg, at((from + to) / 2), top + 62, name, name === state.matrix ? "b m" : "q m");
  }
  return { width, at, words, slices };
}

function fill({ width, words, slices }, place) {
  const dp = slices.length, tp = +state.tp, whose = `buffer of tp place ${place}: ${count(grid().bucket.length)} entries`;
  retell(words, width < 480 ? whose : `the ${whose}, cut by dp into ${dp} slice${dp > 1 ? "s" : ""}`);
  slices.forEach(([drawn, label], d) => {
    change(drawn, { fill: colour(d * tp + place) });
    retell(label, width / dp > 70 ? `rank ${d * tp + place}` : String(d * tp + place));
  });
}

scene("who", ["dp", "tp", "matrix", "strategy"], (it, holder) => {
  gridControls(it, holder);
  radios(it, holder, "strategy", "strategy", STRATEGIES.map(name => [name, name]));
}, function (stage, width) {
  const dp = +state.dp, tp = +state.tp, name = state.strategy;
  const held = grid().strategies[name].matrices[state.matrix], weights = grid().weights[state.matrix];
  const side = Math.min((width - 2 - 26 * (tp - 1)) / tp / 2 - 4, 112), cell = 2 * side + 8, gap = Math.min(64, tp > 1 ? (width - 2 - tp * cell) / (tp - 1) : 0);
  const [wide, high] = frame(side), pitch = high + 62, buffered = name.startsWith("zero1"), area = shape()[0] * shape()[1];
  const words = `dp=${dp}, tp=${tp}: what each rank holds of ${state.matrix} under ${name}`;
  const svg = picture(stage, width, dp * pitch + (buffered ? 100 : 4), words), left = (width - tp * cell - (tp - 1) * gap) / 2;
  for (let rank = 0; rank < dp * tp; rank++) {
    const x = left + (rank % tp) * (cell + gap), y = Math.floor(rank / tp) * pitch, works = held.workers.includes(rank);
    text(svg, x, y + 16, `rank ${rank}${works && cell <= 130 ? " ✓" : ""}`, "b");
    if (works && cell > 130) text(svg, x + side + 8 + wide, y + 16, "works", "q e");
    [weights[rank], held.momentum[rank]].forEach((boxes, place) => {
      const from = x + place * (side + 8);
      box(svg, from, y + 24, wide, high, "var(--empty)", { stroke: "var(--edge)" });
      for (const [row, column, rows, columns] of boxes)
        box(svg, from + column / shape()[1] * wide, y + 24 + row / shape()[0] * high, columns / shape()[1] * wide, rows / shape()[0] * high, colour(rank), { stroke: "#1b1b1b", "stroke-width": .8 });
      if (wide > 66) text(svg, from, y + 40 + high, place ? "momentum" : "weight", "q");
      else text(svg, from, y + 40 + high, place ? "m" : "w", "q");
    });
  }
  if (buffered) fill(ruler(svg, width, dp * pitch + 28), 0);
  const kept = held.momentum.map(boxes => boxes.reduce((sum, each) => sum + each[2] * each[3], 0));
  const most = Math.max(...kept), none = kept.filter(each => !each).length;
  const { sent, state: bytesKept } = grid().strategies[name];
  say(scenes[0], `${count(dp * tp)} rank${dp * tp > 1 ? "s" : ""} under *${name}*: ${MEANS[name]}. A rank keeps up to *${Math.round(100 * most / area)}%* of the momentum of ${state.matrix}${none ? `, and ${none} keep${none > 1 ? "" : "s"} none` : ""}; ${held.workers.length === 1 ? `rank *${held.workers[0]}* runs` : `ranks *${list(held.workers)}* run`} Newton–Schulz on it. For all three matrices, rank 0 sends *${bytes(sent)}* in a step and keeps *${bytes(bytesKept)}* of momentum.`);
});

// 2. Seven phases.

function entryAt(row, column) {
  const run = grid().bucket.runs[state.matrix].find(each => each[0] === row && each[1] <= column && column < each[1] + each[2]);
  if (!run) return null;
  const along = column - run[1];
  return { rank: run[3], inBucket: run[4] + along, inSlice: run[5] + along };
}

function entry() {
  return [Math.min(+state.row, shape()[0] - 1), Math.min(+state.column, shape()[1] - 1)];
}

const SENDS = ["gradients", "momentum", "momentum", "", "", "", "weights"];

/** A moment's title as in the course, whose matrix tp cuts by columns, in words for the matrix shown. */
function title(moment) {
  const cut = shape()[0] > shape()[1] ? "rows" : "columns";
  return [...["Each rank has a gradient of its own data", "Average over dp, and keep a slice", "Bring the slices together, along dp"], `Bring the ${cut} together, along tp`,
    "Newton–Schulz, on the whole matrix", `Keep your ${cut}: nothing is sent`, "Keep your slice: nothing is sent", "New weights: gather the slices, along dp"][moment];
}

/** Frames for what each rank has, and the buffer's ruler: these stay while moment, row and column change. */
function film(stage, width) {
  const dp = +state.dp, tp = +state.tp, cell = Math.min((width - 2 - 14 * (tp - 1)) / tp, 200), [across, down] = frame(cell), pitch = down + 34;
  const left = (width - tp * cell - 14 * (tp - 1)) / 2, [rows, columns] = shape(), top = dp * pitch + 44;
  const svg = picture(stage, width, top + 76, ""), head = text(svg, 0, 16, "", "b"), panels = [];
  for (let rank = 0; rank < dp * tp; rank++) {
    const x = left + (rank % tp) * (cell + 14), y = 48 + Math.floor(rank / tp) * pitch;
    text(svg, x, y - 6, `rank ${rank}`, "b");
    const letter = text(svg, x + across, y - 6, "", "q e"), panel = svg.appendChild(draw("g", { "data-rank": rank, style: "cursor:crosshair" }));
    box(panel, x, y, across, down, "var(--empty)", { stroke: "var(--edge)" });
    const tiles = panel.appendChild(draw("g", {})), circle = panel.appendChild(draw("circle", { r: 5, "stroke-width": 1.6 }));
    panel.addEventListener("click", event => {
      const seen = svg.getBoundingClientRect(), scale = width / seen.width;
      const r = Math.floor(((event.clientY - seen.top) * scale - y) / down * rows), c = Math.floor(((event.clientX - seen.left) * scale - x) / across * columns);
      set({ row: String(Math.min(rows - 1, Math.max(0, r))), column: String(Math.min(columns - 1, Math.max(0, c))) });
    });
    panels.push({ x, y, letter, tiles, circle });
  }
  const buffer = ruler(svg, width, top);
  const cursor = svg.appendChild(draw("path", { "data-top": top - 5, stroke: "var(--wrong)", "stroke-width": 2.4 }));
  return { svg, head, panels, across, down, buffer, cursor };
}

/** Fill the frames with what the ranks have at a moment. */
function advance(it, moment) {
  const { svg, head, panels, across, down } = it.film, { letters, tiles } = grid().film[state.matrix], [rows, columns] = shape();
  it.film.moment = moment;
  svg.setAttribute("aria-label", `${title(moment)}. ${data.moments[moment]} on each of ${panels.length} ranks.`);
  retell(head, title(moment));
  [...it.strip.children].forEach((each, place) => {
    const { kind, axis } = grid().sent[place];
    each.className = place + 1 === moment ? "on" : "";
    retell(each.lastChild, kind ? `${SENDS[place]}, over ${axis}` : "nothing sent");
  });
  panels.forEach(({ x, y, letter, tiles: holder }, rank) => {
    retell(letter, letters[moment][rank] && across > 90 ? `bytes ${letters[moment][rank]}` : "");
    holder.replaceChildren();
    const places = tiles[moment][rank].map(([, top, from, high, wide]) => [x + from / columns * across, y + top / rows * down, wide / columns * across, high / rows * down]);
    places.forEach((place, index) => box(holder, ...place, colour(tiles[moment][rank][index][0]), { stroke: "#1b1b1b", "stroke-width": .7 }));
    if (moment >= 4 && moment < 7) boxes(holder, places, "url(#hatch)");
    places.forEach(([left, top, wide, high], index) => {
      if (wide > 22 && high > 22) text(holder, left + wide - 5, top + high - 6, tiles[moment][rank][index][0], "on e");
    });
  });
}

scene("phases", ["dp", "tp", "matrix", "moment", "row", "column"], (it, holder) => {
  it.strip = element("ol", { className: "strip" }, ...data.phases.map(phase => element("li", {}, element("b", {}, phase), " ")));
  it.figure.insertBefore(it.strip, it.stage);
  slider(it, holder, "moment", "after phase", MOMENTS, value => value === "0" ? "0, before the step" : `${value}, ${data.phases[value - 1]}`, true);
  player(it, holder, "moment", MOMENTS);
  gridControls(it, holder);
  slider(it, holder, "row", "row", () => numbers(0, shape()[0] - 1), () => String(entry()[0]));
  slider(it, holder, "column", "column", () => numbers(0, shape()[1] - 1), () => String(entry()[1]));
}, function (stage, width) {
  const it = scenes[1], dp = +state.dp, tp = +state.tp, moment = +state.moment, tiles = grid().film[state.matrix].tiles[moment];
  const [rows, columns] = shape(), [row, column] = entry(), place = entryAt(row, column), keeper = place.rank;
  const key = [dp, tp, state.matrix, width].join(" ");
  if (it.film?.key !== key) it.film = { key, ...film(stage, width) };
  if (it.film.moment !== moment) advance(it, moment);
  const { panels, across, down, buffer, cursor } = it.film, holders = [];
  panels.forEach(({ x, y, circle }, rank) => {
    const holds = tiles[rank].some(([, top, from, high, wide]) => row >= top && row < top + high && column >= from && column < from + wide);
    if (holds) holders.push(rank);
    change(circle, { cx: x + (column + .5) / columns * across, cy: y + (row + .5) / rows * down, fill: holds ? "#1b1b1b" : "none", stroke: holds ? "#fff" : "var(--quiet)" });
  });
  fill(buffer, keeper % tp);
  change(cursor, { d: `M${buffer.at(place.inBucket)} ${cursor.dataset.top}v54` });
  const sent = moment ? data.phases[moment - 1] : "", cost = moment ? grid().sent[moment - 1] : null;
  const told = !cost ? "Nothing has been sent yet." : cost.kind ? `Phase ${moment}, ${sent}: an ${cost.kind} over ${cost.axis}. The busiest rank hands over *${bytes(Math.max(...cost.bytes))}* for all three matrices.` : `Phase ${moment}, ${sent}: *nothing is sent*.`;
  const has = holders.length ? `ranks *${list(holders)}* ${holders.length > 1 ? "have" : "has"} it now` : "no rank has it now";
  say(it, `${told.replace("an reduce", "a reduce")} Entry (${row}, ${column}) of ${state.matrix}: number *${count(row * columns + column)}* of the matrix, *${count(place.inBucket)}* of the buffer; rank *${keeper}* keeps its momentum, at *${count(place.inSlice)}* of its slice; ${holders.length === 1 ? has.replace("ranks", "rank") : has}.`);
});

// 3. Be the network.

const ended = new Map();

function walked() {
  const { states } = data.networks[state.net], order = [];
  let now = 0;
  for (const choice of state.answers === "" ? [] : state.answers.split(".")) {
    const ready = states[now].ready[+choice];
    if (!ready) break;
    order.push(ready);
    now = ready[4];
  }
  return { now: states[now], order, network: data.networks[state.net] };
}

const trail = () => state.answers === "" ? [] : state.answers.split(".");
const answer = choice => set({ answers: [...trail(), choice].join(".") });

scene("network", ["net", "answers"], (it, holder) => {
  radios(it, holder, "net", "grid (dp × tp)", Object.keys(data.networks).map(name => [name, name.replace("x", " × ")])).addEventListener("change", () => set({ answers: "" }));
  const row = element("div", { className: "stops" });
  it.back = button(row, "Undo", () => set({ answers: trail().slice(0, -1).join(".") }));
  it.again = button(row, "Start again", () => set({ answers: "" }));
  it.rest = button(row, "Finish at random", () => {
    const { states } = data.networks[state.net], done = trail();
    let now = done.reduce((at, choice) => states[at].ready[+choice][4], 0);
    while (states[now].ready.length) {
      const choice = Math.floor(Math.random() * states[now].ready.length);
      done.push(choice);
      now = states[now].ready[choice][4];
    }
    set({ answers: done.join(".") });
  });
  holder.append(row);
  it.groups = element("div", { className: "groups" });
  it.figure.insertBefore(it.groups, it.said);
}, function (stage, width) {
  const it = scenes[2], { now, order, network } = walked(), [, tp] = state.net.split("x").map(Number), total = now.phase.length;
  const high = 54, cell = Math.min(width / tp, 230), left = (width - cell * tp) / 2, top = Math.ceil(total / tp) * (high + 10);
  const each = Math.min(58, width / Math.max(network.answers, order.length, 1)), done = !now.ready.length;
  const svg = picture(stage, width, top + 76, done ? `All ranks are through. Hash ${network.hash}` : `${order.length} of ${network.answers} groups answered, ${now.ready.length} ready.`);
  for (let rank = 0; rank < total; rank++) {
    const group = now.ready.find(ready => ready[0].includes(rank)), x = left + (rank % tp) * cell, y = Math.floor(rank / tp) * (high + 10) + 3;
    box(svg, x + 3, y, cell - 10, high, colour(rank), { rx: 5, stroke: group ? `var(--${group[1]})` : "#1b1b1b", "stroke-width": group ? 4.5 : .8 });
    text(svg, x + 13, y + 22, `rank ${rank}`, "on b");
    const phase = now.phase[rank];
    text(svg, x + 13, y + 41, phase ? cell > 150 ? `${group ? "ready" : "waits"}, phase ${phase}` : `phase ${phase}` : "is through", "on");
  }
  order.forEach((one, place) => {
    box(svg, place * each + 1, top + 8, each - 4, 34, "var(--ground)", { stroke: `var(--${one[1]})`, "stroke-width": 2.2, rx: 3 });
    text(svg, (place + .5) * each - 1, top + 30, one[2], "b m");
    if (each > 42) text(svg, (place + .5) * each - 1, top + 58, one[0].join(","), "q m");
  });
  if (!order.length) text(svg, 0, top + 30, "Your answers will line up here.", "q");
  it.groups.replaceChildren();
  now.ready.forEach((one, choice) => {
    button(it.groups, `ranks ${list(one[0])}: phase ${one[2]}, ${data.phases[one[2] - 1]}${one[3] && !one[3].startsWith("bucket") ? ` of ${one[3]}` : ""}`, () => {
      answer(choice);
      (it.groups.querySelector("button") ?? it.again).focus({ preventScroll: true });
    }).className = one[1];
  });
  it.back.disabled = it.again.disabled = !order.length;
  it.rest.disabled = done;
  if (done) ended.set(`${state.net} ${state.answers}`, network.hash);
  const mine = [...ended.keys()].filter(key => key.startsWith(state.net)).length;
  say(it, done ? `Every rank is through. The hash of all weights on all ranks: *${network.hash}*. You have tried *${mine}* of the *${count(network.orders)}* possible orders; they ended in *1* hash.`
    : `*${order.length}* of ${network.answers} answered. Ready: *${now.ready.length}* group${now.ready.length > 1 ? "s" : ""}. There are ${count(network.orders)} orders in which this step can be answered. Blue outlines are dp groups, orange ones tp groups.`);
});

// 4. One rank is wrong.

/** The table of moments and matrices, with three paths for its stripes: wrong, right, and not played yet. */
function board(stage, width) {
  const { matrices, phases, ranks, steps } = data.saboteur, moments = steps * phases.length, wide = width > 560, high = 20;
  const label = wide ? 132 : 50, cell = (width - label) / matrices.length, slot = (cell - 3) / ranks, top = moment => 24 + moment * (high + 5) + 6 * Math.floor(moment / phases.length);
  const svg = picture(stage, width, 24 + moments * (high + 5) + 12, "");
  const names = matrices.map((name, column) => text(svg, label + (column + .5) * cell, 14, width > 480 ? name : name.replace("down", "d").replace("up", "u")));
  const rows = numbers(0, moments - 1).map(moment => {
    const words = `${Math.floor(moment / phases.length) + 1} · ${phases[moment % phases.length]}`;
    return text(svg, 0, top(+moment) + 15, wide ? words : words.replace(" · gradients", " grad").replace(" · own updates", " upd").replace(" · weights", " wgt"));
  });
  const paths = ["var(--wrong)", "var(--right-fill)", "var(--empty)"].map(fill => svg.appendChild(draw("path", { fill })));
  return { width, svg, names, rows, paths, place: (moment, column, rank) => [label + column * cell + rank * slot, top(moment), slot - .6, high] };
}

scene("sabotage", ["rank", "hit", "fault", "after"], (it, holder) => {
  radios(it, holder, "rank", "sabotage rank", numbers(0, data.saboteur.ranks - 1).map(rank => [rank, rank]));
  radios(it, holder, "hit", "its gradient of", data.saboteur.matrices.map(name => [name, name]));
  radios(it, holder, "fault", "what happens", Object.entries(data.saboteur.faults).map(([words, value]) => [value, words]));
  const all = choices.after.allowed;
  slider(it, holder, "after", "moments played", all, value => value, true);
  player(it, holder, "after", all);
  it.verdicts = element("div", { className: "verdicts", role: "status" });
  it.figure.insertBefore(it.verdicts, it.said);
}, function (stage, width) {
  const it = scenes[3], { matrices, phases, ranks, runs } = data.saboteur, run = runs[`${state.rank} ${state.hit} ${state.fault}`], after = +state.after;
  if (it.board?.width !== width) it.board = board(stage, width);
  const { svg, names, rows, paths, place } = it.board, fills = paths.map(() => []);
  svg.setAttribute("aria-label", `What every rank holds after ${after} moments; red differs from a healthy run.`);
  names.forEach((drawn, column) => change(drawn, { class: matrices[column] === state.hit ? "b m" : "q m" }));
  run.wrong.forEach((row, moment) => {
    change(rows[moment], { class: moment < after ? "" : "q" });
    row.forEach((bits, column) => {
      for (let rank = 0; rank < ranks; rank++) fills[moment >= after ? 2 : bits >> rank & 1 ? 0 : 1].push(place(moment, column, rank));
    });
  });
  fills.forEach((corners, kind) => change(paths[kind], { d: outline(corners) }));
  const last = Math.floor(after / phases.length) * phases.length - 1, spoilt = last < 0 ? 0 : run.wrong[last].filter(Boolean).length, agree = !after || run.agree[after - 1];
  it.verdicts.replaceChildren(
    element("p", { className: agree ? "good" : "bad" }, `${agree ? "✓" : "✗"} all ranks hold the same weights: ${agree ? "yes" : "no"}`),
    element("p", { className: spoilt ? "bad" : "good" }, `${spoilt ? "✗" : "✓"} weights as in a healthy run: ${matrices.length - spoilt} of ${matrices.length}`));
  const touched = run.wrong.slice(0, after).some(row => row.some(Boolean));
  say(it, `In step 1, rank *${state.rank}* ${state.fault === "lost" ? "loses its gradient" : "turns the sign of one row of its gradient"} of *${state.hit}*. ` +
    (spoilt ? `By now *${spoilt} of ${matrices.length}* weight matrices are wrong on ${agree ? "every rank, and all ranks agree" : "some rank"}.` : touched ? "So far only that rank’s own numbers are wrong." : "Nothing is wrong so far.") + " Each box stands for one matrix, with a stripe for each rank. A step has three moments: averaged gradients; the updates that a rank has computed of its own matrices; weights.");
});

// 5. Shards alone.

function heat(canvas, shades) {
  const { rows, columns, most } = data.alone, context = canvas.getContext("2d"), dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const image = context.createImageData(columns, rows), [low, high] = dark ? [[19, 21, 25], [140, 196, 255]] : [[255, 255, 255], [11, 60, 120]];
  for (let place = 0; place < rows * columns; place++) {
    const share = (shades.charCodeAt(place) - 97) / most;
    for (let part = 0; part < 3; part++) image.data[4 * place + part] = low[part] + (high[part] - low[part]) * share;
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

scene("alone", ["input", "cut", "pieces"], (it, holder) => {
  slider(it, holder, "pieces", "pieces:", data.alone.cuts.map(String));
  radios(it, holder, "cut", "cut by", [["columns", "columns"], ["rows", "rows"]]);
  radios(it, holder, "input", "matrix", [["real", "a real gradient"], ["Gaussian", "random numbers"], ["power law", "a few loud directions"]]);
  it.maps = ["whole", "alone"].map(() => element("canvas", { width: data.alone.columns, height: data.alone.rows, role: "img", "aria-label": "not drawn yet" }));
  it.words = it.maps.map(() => element("p"));
  it.stage.append(element("div", { className: "pair" }, ...it.maps.map((map, place) => element("div", {}, it.words[place], map))));
}, function () {
  const it = scenes[4], whole = data.alone.runs[`${state.input} ${state.cut} 1`], alone = data.alone.runs[`${state.input} ${state.cut} ${state.pieces}`];
  const off = run => `${Math.round(100 * (1 - run.diagonal))}% of the update off the diagonal`;
  [whole, alone].forEach((run, place) => {
    it.words[place].textContent = `${place ? state.pieces === "1" ? "In one piece" : `In ${state.pieces} pieces, each orthogonalized alone` : "The whole matrix, orthogonalized"}: ${off(run)}`;
    it.maps[place].setAttribute("aria-label", it.words[place].textContent);
    heat(it.maps[place], run.shades);
  });
  const [most, least] = alone.values, flat = most - least < .01, many = +state.pieces > 1;
  say(it, `Singular values of the update: from *${least.toFixed(2)}* to *${most.toFixed(2)}*${flat ? `, perfectly flat${many ? ` (each piece has 1, and ${state.pieces} of them side by side have √${state.pieces})` : ""}` : ""}. Cosine to the right update: *${alone.cosine.toFixed(2)}*. Even with the best learning rate it misses the right update by *${Math.round(100 * alone.left)}%* of that update’s size. Rows of the picture are the gradient’s output directions and columns its input directions; the columns on the right are inputs that the gradient does not use. A square stands for 4 × 4 entries.`);
});

// 6. What it costs.

scene("cost", ["strategy", "ranks"], (it, holder) => {
  slider(it, holder, "ranks", "ranks:", data.scale.ranks.map(String), count, true);
  radios(it, holder, "strategy", "strategy", Object.keys(data.scale.strategies).map(name => [name, name]));
  const columns = [["sent", "bytes sent by a rank", bytes], ["work", "Newton–Schulz work of a rank", value => quantity(value, ["", "thousand", "million", "GFLOP", "TFLOP", "PFLOP"])], ["memory", "memory for the step", bytes], ["seconds", "time of the step", seconds]];
  const cells = {}, most = {};
  for (const [key] of columns) most[key] = Math.max(...Object.values(data.scale.strategies).flat().map(each => each[key]));
  const head = element("tr", {}, element("th", { scope: "col" }, "strategy"), ...columns.map(([, words]) => element("th", { scope: "col" }, words)));
  const body = Object.keys(data.scale.strategies).map(name => {
    cells[name] = { row: element("tr"), each: columns.map(([, words]) => [element("span"), element("i"), words]) };
    cells[name].row.append(element("th", { scope: "row" }, name), ...cells[name].each.map(([value, bar, words]) => element("td", { "data-label": words }, value, bar)));
    return cells[name].row;
  });
  it.stage.append(element("table", { className: "bars" }, element("thead", {}, head), element("tbody", {}, ...body)));
  it.fill = at => {
    for (const [name, { row, each }] of Object.entries(cells)) {
      row.className = name === state.strategy ? "on" : "";
      each.forEach(([value, bar], place) => {
        const [key, , words] = columns[place], found = data.scale.strategies[name][at][key];
        value.textContent = words(found);
        bar.style.width = `${100 * found / most[key]}%`;
      });
    }
  };
}, function () {
  const it = scenes[5], at = data.scale.ranks.map(String).indexOf(state.ranks), name = state.strategy in data.scale.strategies ? state.strategy : "", { model, tp, machine, matrices } = data.scale;
  it.fill(at);
  const found = name && data.scale.strategies[name][at];
  say(it, `${found ? `*${name}* on *${count(state.ranks)}* ranks: ${MEANS[name]}. The busiest rank works on *${found.runs}* of ${matrices} matrices. ` : `*${state.strategy}* is not in this table: it expects parameters that FSDP2 has cut; scene 7 shows it. `}Predicted by walking the package’s own step for ${model} at tp=${tp} on the machine file ${machine}; nothing here was timed. Bars compare with the largest value at any number of ranks.`);
});

// 7. Where time goes.

scene("time", ["link", "way", "window"], (it, holder) => {
  radios(it, holder, "link", "link", [["loopback", "loopback, as fast as it goes"], ["200mbit", "200 Mbit/s, shared"]]);
  radios(it, holder, "way", "strategy", [["zero1", "zero1"], ["owner", "owner"]]);
  radios(it, holder, "window", "window: buckets in flight", [["1", "1"], ["3", "3"]]);
}, function (stage, width) {
  const { steps, ranks, about } = data.timelines, step = steps[`${state.way} ${state.window} ${state.link}`];
  const most = Math.max(...Object.entries(steps).filter(([key]) => key.endsWith(state.link)).map(([, each]) => each.seconds)), left = 54, x = at => left + at / 1e6 / most * (width - left - 2);
  const svg = picture(stage, width, ranks * 46 + 54, `${state.way} on ${state.link}: ${seconds(step.seconds)} a step`);
  for (let rank = 0; rank < ranks; rank++) {
    text(svg, 0, rank * 46 + 24, `rank ${rank}`, "b");
    box(svg, left, rank * 46 + 6, width - left - 2, 34, "var(--empty)", { opacity: .5 });
  }
  ["var(--accent)", "var(--edge)", "", "var(--tp)"].forEach((fill, kind) => {
    if (!fill) return;  // waiting is what is left empty
    const mine = step.spans.filter(([, doing]) => doing === kind), low = kind === 3;
    boxes(svg, mine.map(([rank, , begin, end]) => [x(begin), rank * 46 + (low ? 26 : 6), Math.max(.7, x(end) - x(begin)), low ? 14 : 18]), fill);
  });
  svg.appendChild(draw("path", { d: `M${x(step.seconds * 1e6)} 2V${ranks * 46}`, stroke: "var(--ink)", "stroke-width": 1.6, "stroke-dasharray": "4 3" }));
  const foot = ranks * 46 + 22;
  for (const [place, [words, fill]] of [["products", "var(--accent)"], ["copies", "var(--edge)"], ["transfers", "var(--tp)"]].entries()) {
    box(svg, left + place * 92, foot - 11, 13, 13, fill);
    text(svg, left + place * 92 + 19, foot, words);
  }
  text(svg, left, foot + 24, "0 s", "q");
  text(svg, width - 2, foot + 24, seconds(most), "q e");
  say(scenes[6], `Recorded: *${seconds(step.seconds)}* for a step. The package had predicted *${seconds(step.predicted)}*. ${about.step}; ${about.machine}. All four choices on a link share one scale; pieces shorter than a thousandth of the step are left out.`);
});

start();
