"use strict";
// Show a hint at tables that are clipped.
const sayClipped = () => document.querySelectorAll(".scroll").forEach(box => {
  if (box.clientWidth && box.scrollWidth > box.clientWidth + 1) box.dataset.clipped = "Scroll right to see more.";
  else delete box.dataset.clipped;
});
addEventListener("load", sayClipped);
addEventListener("resize", sayClipped);
document.addEventListener("toggle", sayClipped, true);
// One explorer for each element of the class "explorer": its state, keys, and drawings. See view.py for the data format.
for (const root of document.querySelectorAll(".explorer")) (async () => {
  const $ = selector => root.querySelector(selector);
  const view = JSON.parse($("script.view").textContent);
  const trusted = view.trusted || "reference";
  const numbers = await unpack($("script.data").textContent.trim(), view.size);
  const options = [...root.querySelectorAll(".tap")];
  const list = $(".taps"), maps = $(".maps"), heads = $(".heads");
  const state = {tap: 0, port: 0, head: 0, row: 0, column: 0};
  let frames = [], dark = matchMedia("(prefers-color-scheme: dark)");

  async function unpack(text, size) {
    const packed = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const bits = new Uint32Array(size);
    for (let i = 0; i < size; i++)
      bits[i] = planes[i] | planes[size + i] << 8 | planes[2 * size + i] << 16 | planes[3 * size + i] << 24;
    for (const tap of view.taps) for (const port of tap.ports)
      if (port && "values" in port)
        for (let i = 0, n = count(tap); i < n; i++) bits[port.values + i] ^= bits[tap.reference + i];
    return new Float32Array(bits.buffer);
  }

  function count(tap) { return tap.shape.reduce((product, n) => product * n, 1); }
  function tap() { return view.taps[state.tap]; }
  function port() { return tap().ports[state.port]; }
  function over(entry) { return entry && !(Number(entry.error) <= Number(entry.tolerance)); }

  // Norms [N, L] are drawn as one map with N rows, and values [N, L, n] as N maps.
  function layout(of = tap()) {
    const [first, second, third] = of.shape;
    return third === undefined ? {heads: 1, rows: first, columns: second} : {heads: first, rows: second, columns: third};
  }
  function place(head, row, column) {
    const {rows, columns} = layout();
    return (head * rows + row) * columns + column;
  }
  function reference(i) { return numbers[tap().reference + i]; }
  function value(i, entry = port()) { return entry && "values" in entry ? numbers[entry.values + i] : NaN; }
  function difference(i, entry = port()) {
    return entry && "apart" in entry ? numbers[entry.apart + i] : value(i, entry) - reference(i);
  }

  // Labels
  function token(side, i) { return view.tokens[side][i].replace(/\u2581/g, "_"); }
  function rowLabel(i) { return tap().full ? token(tap().rows, i) : layout().rows > 1 ? `head ${i}` : "norm"; }
  function columnLabel(i) {
    if (!tap().full) return token(tap().rows, i);
    return tap().columns === "channel" ? `${tap().channels ? tap().channels[i] : i}` : token(tap().columns, i);
  }
  function where() {
    const {heads: all} = layout(), at = tap();
    const row = at.rows, column = at.columns, position = (side, i) => {
      const at = `${view.starts[side] + i}`, text = token(side, i);
      return text === at ? `${side} ${at}` : `${side} ${at} “${text}”`;
    };
    const parts = all > 1 ? [`head ${state.head}`] : [];
    if (!at.full) {
      if (layout().rows > 1) parts.push(`head ${state.row}`);
      parts.push(position(row, state.column), "norm over the channels");
    } else if (column === "channel") parts.push(position(row, state.row), `channel ${columnLabel(state.column)}`);
    else parts.push(`query ${position(row, state.row)}`, `key ${position(column, state.column)}`);
    return parts.join(", ");
  }
  // Return the shortest text that parses to the same float32.
  function exact(number) {
    if (!Number.isFinite(number)) return String(number);
    for (let digits = 1; digits < 9; digits++) {
      const text = number.toPrecision(digits);
      if (Math.fround(Number(text)) === number) return tidy(number, digits);
    }
    return tidy(number, 9);
  }
  function tidy(number, digits) {
    const isSmall = number !== 0 && Math.abs(number) < 1e-3;
    return (isSmall ? number.toExponential(digits - 1) : number.toPrecision(digits)).replaceAll("-", "−");
  }
  function short(number) { return number === 0 ? "0" : tidy(number, 2); }
  function says(error) { return Number(error) === 0 ? "exact" : Number.isFinite(Number(error)) ? Number(error).toExponential(1).replace("-", "−") : String(error); }

  // Selection
  function choose(change) {
    const before = {...state};
    Object.assign(state, change);
    state.tap = Math.max(0, Math.min(view.taps.length - 1, state.tap));
    const {heads: all, rows, columns} = layout();
    state.head = (state.head + all) % all;
    state.row = Math.max(0, Math.min(rows - 1, state.row));
    state.column = Math.max(0, Math.min(columns - 1, state.column));
    const moved = ["tap", "port", "head"].some(key => state[key] !== before[key]);
    if (moved || !frames.length) draw(); else frames.forEach(frame => frame.paint());
    read();
  }
  function toTap(index) { choose({tap: index}); worst(); }
  function worst() {
    const {heads: all, rows, columns} = layout();
    let largest = -1, found = {};
    for (let head = 0; head < all; head++) for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      const apart = Math.abs(difference(place(head, row, column)));
      if (apart > largest) { largest = apart; found = {head, row, column}; }
    }
    choose(found);
  }
  function first() {
    const ports = view.ports.map((_, i) => i).filter(i => view.taps.some(one => over(one.ports[i])));
    if (!ports.length) return;
    const chosen = ports.includes(state.port) ? state.port : ports[0];
    choose({port: chosen});
    toTap(view.taps.findIndex(one => over(one.ports[chosen])));
  }

  // Drawing
  function color(name) { return getComputedStyle(root).getPropertyValue(`--${name}`).trim(); }
  function rgb(name) { return [1, 3, 5].map(i => parseInt(color(name).slice(i, i + 2), 16)); }
  function largest(get) {
    let most = 0;
    for (let i = 0, n = count(tap()); i < n; i++) { const x = Math.abs(get(i)); if (x > most && x < Infinity) most = x; }
    return most;
  }
  function shade(scale) {
    const zero = rgb("zero"), plus = rgb("plus"), minus = rgb("minus"), ink = rgb("ink");
    return number => {
      if (!Number.isFinite(number)) return ink;
      const t = scale ? Math.max(-1, Math.min(1, number / scale)) : 0, end = t < 0 ? minus : plus;
      return zero.map((from, i) => from + Math.abs(t) * (end[i] - from));
    };
  }
  function pixels(get, head, ink, width) {
    // Draw at most `width` columns. If multiple columns share a pixel, draw the largest magnitude so that it stays visible.
    const {rows, columns} = layout(), shown = Math.min(columns, width), image = new ImageData(shown, rows);
    for (let row = 0; row < rows; row++) for (let x = 0; x < shown; x++) {
      const [red, green, blue] = ink(get(place(head, row, widest(get, head, row, x, shown))));
      image.data.set([red, green, blue, 255], 4 * (row * shown + x));
    }
    return image;
  }
  function widest(get, head, row, x, shown) {
    const {columns} = layout(), from = Math.floor(x * columns / shown), to = Math.floor((x + 1) * columns / shown);
    let best = from;
    for (let i = from + 1; i < to; i++)
      if (Math.abs(get(place(head, row, i))) > Math.abs(get(place(head, row, best)))) best = i;
    return best;
  }
  function bitmap(image) {
    const canvas = document.createElement("canvas");
    canvas.width = image.width; canvas.height = image.height;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  class Frame {
    constructor(title, detail, get, scale) {
      this.get = get;
      this.figure = document.createElement("figure");
      const caption = document.createElement("figcaption"), name = document.createElement("b");
      name.textContent = title;
      caption.append(name, ` ${detail}`);
      this.canvas = document.createElement("canvas");
      this.figure.append(caption, this.canvas);
      this.ink = shade(scale);
      this.canvas.addEventListener("pointerdown", event => this.point(event));
      this.canvas.addEventListener("pointermove", event => this.point(event));
    }
    fit() {
      const {rows, columns} = layout(), ratio = devicePixelRatio || 1;
      const room = this.figure.clientWidth, text = this.canvas.getContext("2d");
      text.font = "11px sans-serif";
      const names = i => Math.min(90, 8 + Math.max(...Array.from({length: i.n}, (_, k) => text.measureText(i.of(k)).width)));
      this.left = Math.ceil(names({n: rows, of: rowLabel}));
      this.named = columns <= 64;
      const inside = Math.max(40, room - this.left - 2), longest = this.named ? names({n: columns, of: columnLabel}) : 0;
      this.upright = longest - 6 <= inside / columns;
      this.below = this.named && !this.upright ? Math.ceil(longest) : 18;
      this.shown = Math.min(columns, Math.floor(inside));
      this.wide = Math.max(1, Math.min(28, inside / this.shown));
      this.high = Math.max(12, Math.min(28, columns > 64 ? 16 : this.wide));
      this.width = this.shown * this.wide;
      this.height = rows * this.high;
      const width = this.left + this.width + 2, height = this.height + this.below + 2;
      this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.ratio = ratio;
      this.image = bitmap(pixels(this.get, state.head, this.ink, this.shown));
    }
    paint() {
      const {rows, columns} = layout(), pen = this.canvas.getContext("2d");
      pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(this.image, this.left, 1, this.width, this.height);
      pen.strokeStyle = color("line"); pen.lineWidth = 1;
      pen.strokeRect(this.left - .5, .5, this.width + 1, this.height + 1);
      pen.font = "11px sans-serif"; pen.textBaseline = "middle";
      const ink = color("ink"), soft = color("soft");
      for (let row = 0; row < rows; row++) {
        pen.fillStyle = row === state.row ? ink : soft; pen.textAlign = "right";
        pen.fillText(rowLabel(row), this.left - 5, 1 + (row + .5) * this.high, this.left - 6);
      }
      if (this.named) for (let column = 0; column < columns; column++) {
        const every = Math.ceil(11 / this.wide), off = Math.abs(column - state.column);
        if (this.wide < 9 && off && (column % every || off < every)) continue;
        pen.save();
        pen.translate(this.left + (column + .5) * this.wide, this.height + 6);
        pen.fillStyle = column === state.column ? ink : soft;
        pen.textAlign = this.upright ? "center" : "right";
        if (!this.upright) pen.rotate(-Math.PI / 2);
        pen.fillText(columnLabel(column), 0, this.upright ? 4 : 0, this.upright ? undefined : this.below - 4);
        pen.restore();
      } else {
        pen.fillStyle = soft; pen.textAlign = "left";
        pen.fillText(`${columns} channels`, this.left, this.height + 11);
      }
      const x = Math.floor(state.column * this.shown / columns);
      pen.strokeStyle = color("page"); pen.lineWidth = 4; this.box(pen, x);
      pen.strokeStyle = ink; pen.lineWidth = 2; this.box(pen, x);
    }
    box(pen, x) {
      pen.strokeRect(this.left + x * this.wide - .5, 1 + state.row * this.high - .5, this.wide + 1, this.high + 1);
    }
    point(event) {
      const box = this.canvas.getBoundingClientRect(), {rows, columns} = layout();
      const scale = (this.left + this.width + 2) / box.width;
      const x = Math.floor(((event.clientX - box.left) * scale - this.left) / this.wide);
      const row = Math.floor(((event.clientY - box.top) * scale - 1) / this.high);
      if (x < 0 || x >= this.shown || row < 0 || row >= rows) return;
      choose({row, column: this.shown === columns ? x : widest(difference, state.head, row, x, this.shown)});
    }
  }

  function draw() {
    const at = tap(), entry = port(), {heads: all, columns} = layout();
    options.forEach((option, i) => option.setAttribute("aria-selected", String(i === state.tap)));
    const option = options[state.tap];
    list.setAttribute("aria-activedescendant", option.id);
    const top = option.offsetTop - list.offsetTop - 40, bottom = top + option.offsetHeight + 80;
    if (top < list.scrollTop || bottom > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 3;
    $(".title").replaceChildren(...at.name.split(/(?<=\.)/).flatMap(part => [part, document.createElement("wbr")]));
    $(".note").textContent = [at.full ? "" : "Norm over the channels at each position.", at.note,
      entry && entry.problem ? `${view.ports[state.port]}: ${entry.problem}.` : "",
      entry && !over(entry) ? "Within tolerance. The difference has a separate color scale." : "",
      entry ? "" : `${view.ports[state.port]} does not report this tap.`].filter(Boolean).join(" ");
    drawHeads(all);
    const both = Math.max(largest(reference), entry ? largest(value) : 0), apart = largest(difference);
    const name = view.ports[state.port], signed = at.full && !at.name.endsWith(".weights") ? "±" : "0 to ";
    frames = [new Frame(trusted, `float64, ${signed}${short(both)}`, reference, both)];
    if (entry && "values" in entry) {
      frames.push(new Frame(name, `${view.dtype}, ${signed}${short(both)}`, value, both));
      if (apart) frames.push(new Frame(at.full ? "difference" : "norm of the difference",
        `${at.full ? "±" : "0 to "}${short(apart)}`, difference, apart));
    }
    maps.classList.toggle("wide", columns > 64);
    maps.replaceChildren(...frames.map(frame => frame.figure));
    if (entry && "values" in entry && !apart) {
      const same = document.createElement("p");
      same.textContent = `${name} equals the reference in float32, so there is no difference to draw.`;
      maps.append(same);
    }
    frames.forEach(frame => { frame.fit(); frame.paint(); });
  }
  function drawHeads(all) {
    heads.hidden = all < 2;
    heads.setAttribute("aria-label", `Heads of ${port() ? view.ports[state.port] : "the reference"}`);
    if (all < 2) return heads.replaceChildren();
    const get = port() && "values" in port() ? value : reference, ink = shade(largest(get));
    heads.replaceChildren(...Array.from({length: all}, (_, head) => {
      const button = document.createElement("button"), canvas = bitmap(pixels(get, head, ink, 64));
      button.type = "button"; button.setAttribute("role", "radio");
      button.setAttribute("aria-checked", String(head === state.head));
      button.tabIndex = head === state.head ? 0 : -1;
      button.append(canvas, `head ${head}`);
      button.addEventListener("click", () => { choose({head}); heads.children[head].focus(); });
      return button;
    }));
  }
  function read() {
    const i = place(state.head, state.row, state.column), body = $(".ports tbody"), rows = [];
    const line = (cells, name) => {
      const row = document.createElement("tr");
      cells.forEach((content, k) => {
        const cell = document.createElement(k ? "td" : "th");
        if (!k) cell.scope = "row";
        cell.append(content);
        if (k === 5 && name) cell.className = name;
        row.append(cell);
      });
      rows.push(row);
    };
    line([trusted, exact(reference(i)), "", "", "", ""]);
    tap().ports.forEach((entry, number) => {
      const label = document.createElement("label"), input = document.createElement("input");
      input.type = "radio"; input.name = `port-${root.dataset.number}`; input.checked = number === state.port;
      input.addEventListener("change", () => choose({port: number}));
      label.append(input, view.ports[number]);
      if (!entry) return line([label, "not reported", "", "", "", ""]);
      const known = "values" in entry, mark = entry.verdict === "introduced" ? "◆ introduced here" : entry.verdict;
      line([label, known ? exact(value(i, entry)) : "–", known ? exact(Math.fround(difference(i, entry))) : "–",
        says(entry.error), says(entry.tolerance), mark], entry.verdict);
    });
    const focused = body.contains(document.activeElement);
    body.replaceChildren(...rows);
    if (focused) body.querySelector("input:checked").focus();
    $(".cell").textContent = where();
    sayClipped();
  }

  // Keys
  const turn = {
    f: first, w: worst,
    n: () => toTap(Math.min(state.tap + 1, view.taps.length - 1)), p: () => toTap(Math.max(state.tap - 1, 0)),
    h: () => choose({head: state.head + 1}), b: () => choose({port: (state.port + 1) % view.ports.length}),
  };
  const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  root.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inside = element => element.contains(event.target);
    let action;
    if (inside(list)) action = {ArrowDown: turn.n, ArrowUp: turn.p, Home: () => toTap(0), End: () => toTap(view.taps.length - 1)}[event.key];
    else if (inside(heads) && event.key in step) action = () => {
      choose({head: state.head + (step[event.key][0] + step[event.key][1])});
      heads.children[state.head].focus();
    };
    else if (inside(maps) && event.key in step) action = () =>
      choose({row: state.row + step[event.key][0], column: state.column + step[event.key][1]});
    if (action) { event.preventDefault(); event.stopPropagation(); action(); }
  });
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !root.offsetParent) return;
    if (/^(TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const action = event.key.length === 1 && turn[event.key.toLowerCase()];
    if (action) { event.preventDefault(); action(); }
  });
  options.forEach((option, i) => option.addEventListener("click", () => { toTap(i); list.focus(); }));
  $(".first").addEventListener("click", first);
  $(".worst").addEventListener("click", worst);
  $(".first").disabled = !view.taps.some(one => one.ports.some(over));
  dark.addEventListener("change", draw);
  addEventListener("resize", draw);
  root.addEventListener("shown", draw);  // sent when the user selects this case

  const attention = view.taps.findLastIndex(one => one.name.endsWith("cross_attention.weights"));
  if ($(".first").disabled) toTap(Math.max(attention, 0)); else first();
  root.dataset.ready = "true";
})();
