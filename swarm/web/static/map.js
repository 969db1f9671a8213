// The peer map. State is one object as /map.json gives it, kept true by the events of /map/events; what is drawn is drawn at
// most once a frame. Texts of others go into textContent only, never into markup.
const RELOAD_MS = 60_000; // the whole map anew, against drift
const RETRY_MS = 3_000;
const PAGE_ROWS = 100; // of the table at once: 2,000 rows would cost a frame each time they change
const COLUMNS = [
  ["short", "peer"], ["state", "state"], ["state_since", "since", "n"], ["experts", "experts"], ["path", "path"],
  ["rtt_ms", "round trip", "n"], ["seen_since", "seen since", "n"],
];
const IN_USE = new Set(["in use", "on trial", "announced"]);
const BAD = new Set(["caught", "quarantined", "set aside", "unreachable"]);
const $ = (id) => document.getElementById(id);

let map = null; // the JSON, with peers and models as Maps by id
let land = [];
let sortBy = "short", isDescending = false, nRows = PAGE_ROWS, isDue = false;
let pending = []; // events that came before the map did

// What came in

async function load() {
  const answer = await fetch("/map.json");
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  const now = await answer.json();
  now.peers = new Map(now.peers.map((peer) => [peer.id, peer]));
  now.models = new Map(now.models.map((model) => [model.model_id, model]));
  map = now;
  for (const event of pending.splice(0)) apply(event);
  draw();
}

function apply(event) {
  if (map === null) { pending.push(event); return; }
  map.at = event.at;
  Object.assign(map, event.top ?? {});
  for (const id of event.gone ?? []) map.peers.delete(id);
  for (const id of event.gone_models ?? []) map.models.delete(id);
  for (const [id, fields] of Object.entries(event.peers ?? {})) map.peers.set(id, { ...map.peers.get(id), ...fields });
  for (const [id, fields] of Object.entries(event.models ?? {})) map.models.set(id, { ...map.models.get(id), ...fields });
  draw();
}

function watch() {
  const stream = new EventSource("/map/events");
  stream.onopen = () => { setLive(true); load().catch(() => setLive(false)); };
  stream.onmessage = (message) => apply(JSON.parse(message.data));
  stream.onerror = () => { // a browser gives up after an HTTP error
    setLive(false);
    if (stream.readyState === EventSource.CLOSED) setTimeout(watch, RETRY_MS);
  };
}

function setLive(isLive) {
  $("live").classList.toggle("on", isLive);
  $("live-text").textContent = isLive ? "live" : "connecting";
}

// What is shown

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (map === null) return;
    drawFigures(); drawWorld(); drawModels(); drawBoard(); drawPeers();
  });
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // a screen reader hears only what changed
}

function drawFigures() {
  const models = [...map.models.values()], peers = [...map.peers.values()];
  const verdict = $("verdict");
  const nServable = models.filter((model) => model.servable).length;
  verdict.className = `verdict ${map.servable ? "yes" : "no"}`;
  setText(verdict, models.length === 0 ? "No model is on offer yet"
    : models.length === 1 ? `${models[0].model} ${map.servable ? "can" : "cannot"} be served now`
    : `${nServable} of ${models.length} models can be served now`);
  let nHeld = 0, nAll = 0;
  for (const model of models) for (const row of Object.values(model.replicas)) {
    nAll += row.length;
    for (const digit of row) if (digit !== "0") nHeld++;
  }
  const rtts = peers.map((peer) => peer.rtt_ms).filter((rtt) => rtt != null).sort((a, b) => a - b);
  setText($("n-used"), `${map.n_used} of ${peers.length}`);
  setText($("covered"), nAll ? `${Math.floor(nHeld / nAll * 1000) / 10} %` : "–");
  setText($("rtt"), rtts.length ? `${round(rtts[rtts.length >> 1])} ms` : "–");
  setText($("tokens"), map.tokens_per_s == null ? "–" : String(round(map.tokens_per_s)));
  setText($("source"), map.source);
  setText($("join"), map.join || "swarm join");
}

const round = (value) => (value < 10 ? Math.round(value * 10) / 10 : Math.round(value));

function theme(name) {
  // light-dark() resolves only where it is used as a colour
  const probe = theme.probe ??= document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

let backdrop = null; // sea and land, drawn anew only when size or colours change

function drawWorld() {
  const canvas = $("world"), scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; backdrop = null; }
  const at = ([lat, lon]) => [(lon + 180) / 360 * width, (84 - lat) / 144 * height]; // 84 N to 60 S
  const look = [theme("land"), land.length].join();
  if (backdrop === null || backdrop.look !== look) {
    backdrop = Object.assign(document.createElement("canvas"), { width, height, look });
    const pen = backdrop.getContext("2d");
    pen.fillStyle = theme("land");
    pen.beginPath();
    for (const polygon of land) for (const ring of polygon) {
      if (ring.every(([, lat]) => lat < -60)) continue; // below the map's edge
      // Over the date line longitudes go on counting; a copy on the other side shows what lies beyond the edge.
      let last = ring[0][0];
      const points = ring.map(([lon, lat]) => [(last += ((lon - last + 540) % 360) - 180), lat]);
      for (const turn of points.some(([lon]) => Math.abs(lon) > 180) ? [-360, 0, 360] : [0]) {
        points.forEach(([lon, lat], index) => {
          const [x, y] = at([lat, lon + turn]);
          if (index) pen.lineTo(x, y); else pen.moveTo(x, y);
        });
        pen.closePath();
      }
    }
    pen.fill("evenodd");
  }
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  pen.drawImage(backdrop, 0, 0);
  const colours = { direct: theme("direct"), relay: theme("relay"), idle: theme("idle") };
  const groups = { direct: [], relay: [], idle: [] };
  const crowd = new Map(); // peers of one place are laid out on a small spiral around it
  let nPlaced = 0;
  for (const peer of map.peers.values()) {
    if (!peer.place) continue;
    nPlaced++;
    const key = peer.place.join();
    const n = crowd.get(key) ?? 0;
    crowd.set(key, n + 1);
    const [x, y] = at(peer.place), distance = 3.2 * scale * Math.sqrt(n), angle = n * 2.39996;
    groups[IN_USE.has(peer.state) ? peer.path ?? "direct" : "idle"]?.push([x + distance * Math.cos(angle), y + distance * Math.sin(angle)]);
  }
  if (map.place) {
    const [x, y] = at(map.place);
    for (const kind of ["direct", "relay"]) {
      pen.strokeStyle = colours[kind];
      pen.globalAlpha = Math.max(.03, .35 * Math.min(1, 40 / groups[kind].length)); // many lines would hide the map
      pen.lineWidth = scale;
      pen.setLineDash(kind === "relay" ? [4 * scale, 4 * scale] : []);
      pen.beginPath();
      for (const [px, py] of groups[kind]) { pen.moveTo(x, y); pen.lineTo(px, py); }
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    pen.fillStyle = theme("ink");
    pen.fillRect(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale);
  }
  const radius = (nPlaced > 300 ? 2 : 3) * scale;
  for (const kind of ["idle", "direct", "relay"]) {
    pen.fillStyle = colours[kind];
    pen.beginPath();
    for (const [x, y] of groups[kind]) { pen.moveTo(x + radius, y); pen.arc(x, y, radius, 0, 7); }
    pen.fill();
  }
  const nHidden = map.peers.size - nPlaced;
  setText($("world-caption"), `${nPlaced} ${nPlaced === 1 ? "peer shows" : "peers show"} a place, ${nHidden} ${nHidden === 1 ? "does" : "do"} not.`);
}

const STEPS = [["0", "nobody"], ["1", "one"], ["2", "two"], ["3", "three or more"]];

function drawModels() {
  const box = $("models");
  const known = new Set();
  for (const model of map.models.values()) {
    known.add(model.model_id);
    let card = [...box.children].find((each) => each.dataset.id === model.model_id);
    if (!card) { card = modelCard(model); box.append(card); }
    setText(card.querySelector("h3"), model.model);
    const badge = card.querySelector(".badge");
    badge.className = `badge ${model.servable ? "yes" : "no"}`;
    setText(badge, model.servable ? "can be served" : "cannot be served");
    const lacks = Object.entries(model.missing).slice(0, 6).map(([layer, experts]) => `layer ${layer}: ${experts}`);
    const more = Object.keys(model.missing).length > 6 ? " …" : "";
    setText(card.querySelector("p"), lacks.length ? `Nobody holds ${lacks.join("; ")}${more}` : "Every expert of every layer has somebody to compute it.");
    drawCoverage(card.querySelector("canvas"), model);
  }
  for (const card of [...box.children]) if (!known.has(card.dataset.id)) card.remove();
}

function modelCard(model) {
  const card = document.createElement("article");
  card.className = "model";
  card.dataset.id = model.model_id;
  const head = card.appendChild(document.createElement("header"));
  head.append(document.createElement("h3"), Object.assign(document.createElement("span"), { className: "badge" }));
  card.append(document.createElement("p"));
  const canvas = card.appendChild(document.createElement("canvas"));
  canvas.setAttribute("role", "img");
  const scale = card.appendChild(Object.assign(document.createElement("div"), { className: "scale" }));
  scale.append("Held by: ");
  for (const [step, words] of STEPS) {
    const item = scale.appendChild(document.createElement("span"));
    const swatch = item.appendChild(document.createElement("i"));
    swatch.dataset.step = step;
    item.append(words);
  }
  return card;
}

function drawCoverage(canvas, model) {
  const rows = Object.entries(model.replicas);
  const nExperts = Math.max(1, ...rows.map(([, row]) => row.length));
  const colours = [theme("bad"), theme("relay"), theme("accent"), theme("direct")];
  const look = JSON.stringify([rows, colours]);
  if (canvas.look === look) return;
  canvas.look = look;
  for (const swatch of canvas.parentElement.querySelectorAll("i[data-step]")) swatch.style.background = colours[+swatch.dataset.step];
  const cell = 6;
  canvas.width = nExperts * cell;
  canvas.height = Math.max(1, rows.length) * cell;
  canvas.style.maxHeight = "22rem";
  const pen = canvas.getContext("2d");
  let fewest = Infinity, nNone = 0;
  rows.forEach(([, row], y) => [...row].forEach((digit, x) => {
    const count = parseInt(digit, 36);
    fewest = Math.min(fewest, count);
    if (!count) nNone++;
    pen.fillStyle = colours[Math.min(count, 3)];
    pen.globalAlpha = .85;
    pen.fillRect(x * cell, y * cell, cell - 1, cell - 1);
  }));
  canvas.setAttribute("aria-label", `Coverage of ${rows.length} layers with up to ${nExperts} experts each: `
    + (nNone ? `${nNone} are held by nobody` : `each is held by at least ${fewest}`));
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function drawBoard() {
  const board = map.leaderboard;
  $("board").hidden = !board;
  if (!board) return;
  const by = board.counted_by.map((id) => id.slice(0, 8)).join(", ");
  setText($("board-about"), board.rows.length
    ? `The last ${board.days} days, as counted by ${board.counted_by.length === 1 ? "backbone" : "backbones"} ${by}. A point is one row for one expert that `
      + "nobody else held; with two holders it is half a point, and so on. Listed is who joined with --name."
    : `Nobody with a name has computed anything in the last ${board.days} days: join with --name to be listed.`);
  const body = $("board-rows");
  while (body.children.length > board.rows.length) body.lastChild.remove();
  board.rows.forEach((row, index) => {
    let line = body.children[index];
    if (!line) {
      line = body.appendChild(document.createElement("tr"));
      for (const kind of ["n", "name", "n", "n", "id"]) {
        const cell = line.appendChild(document.createElement(kind === "name" ? "th" : "td"));
        cell.className = kind;
        if (kind === "name") { cell.scope = "row"; cell.dir = "auto"; }
      }
    }
    [String(index + 1), row.name, compact.format(row.points), compact.format(row.rows), row.short]
      .forEach((text, column) => setText(line.children[column], text));
    line.title = row.id;
  });
}

function drawPeers() {
  const words = $("filter").value.trim().toLowerCase();
  const peers = [...map.peers.values()].filter((peer) => !words
    || `${peer.short} ${peer.id} ${peer.name ?? ""} ${peer.state} ${peer.path ?? ""}`.toLowerCase().includes(words));
  const key = sortBy === "experts" ? (peer) => peer.n_blocks : (peer) => peer[sortBy];
  peers.sort((a, b) => {
    const x = key(a), y = key(b);
    if (x == null || y == null) return (x == null) - (y == null);
    const order = x < y ? -1 : x > y ? 1 : a.id < b.id ? -1 : 1;
    return isDescending ? -order : order;
  });
  const body = $("rows"), shown = peers.slice(0, nRows);
  while (body.children.length > shown.length) body.lastChild.remove();
  shown.forEach((peer, index) => {
    let row = body.children[index];
    if (!row) {
      row = body.appendChild(document.createElement("tr"));
      COLUMNS.forEach(([name, , kind]) => {
        const cell = row.appendChild(document.createElement(name === "short" ? "th" : "td"));
        if (name === "short") cell.scope = "row";
        cell.className = kind ?? (name === "experts" ? "wrap" : "");
      });
    }
    COLUMNS.forEach(([name], column) => (name === "short" ? setName(row.children[column], peer)
      : setText(row.children[column], cellOf(peer, name))));
    row.children[1].className = IN_USE.has(peer.state) ? "state-in" : BAD.has(peer.state) ? "state-bad" : "state-off";
    row.title = peer.id;
  });
  setText($("n-shown"), words ? `${peers.length} of ${map.peers.size} peers` : "");
  $("more").hidden = peers.length <= nRows;
}

function setName(cell, peer) {
  const look = JSON.stringify([peer.name, peer.short]);
  if (cell.look === look) return;
  cell.look = look;
  if (!peer.name) { cell.textContent = peer.short ?? ""; return; }
  const name = document.createElement("bdi"); // so that a name in Arabic or Hebrew does not turn what follows around
  name.textContent = peer.name;
  cell.replaceChildren(name, ` (${peer.short})`);
}

function cellOf(peer, name) {
  switch (name) {
    case "state_since": case "seen_since": return peer[name] == null ? "" : ago(map.at - peer[name]);
    case "rtt_ms": return peer.rtt_ms == null ? "" : `${round(peer.rtt_ms)} ms`;
    case "experts": {
      const groups = peer.experts ?? [];
      return groups.length > 3 ? `${peer.n_blocks} blocks, other ones in each layer`
        : groups.map(([layers, ids]) => `${ids} of layers ${layers}`).join("; ");
    }
    default: return peer[name] ?? "";
  }
}

function ago(seconds) {
  for (const [size, unit] of [[86_400, "d"], [3_600, "h"], [60, "min"]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.max(0, Math.floor(seconds / 5) * 5)} s`; // in steps, so that a row is not written every second
}

// What people do

function addHeads() {
  for (const [name, words, kind] of COLUMNS) {
    const head = $("heads").appendChild(document.createElement("th"));
    head.scope = "col";
    head.className = kind ?? "";
    const button = head.appendChild(Object.assign(document.createElement("button"), { type: "button", textContent: words }));
    button.onclick = () => {
      isDescending = sortBy === name && !isDescending;
      sortBy = name;
      markSorted();
      draw();
    };
  }
  markSorted();
}

function markSorted() {
  COLUMNS.forEach(([name], index) => {
    const head = $("heads").children[index];
    if (name === sortBy) head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
}

$("filter").oninput = () => { nRows = PAGE_ROWS; draw(); };
$("more").onclick = () => { nRows += PAGE_ROWS; draw(); };
$("copy").onclick = async () => {
  try {
    await navigator.clipboard.writeText($("join").textContent);
    setText($("copied"), "Copied.");
  } catch { // not allowed on plain http: select it instead
    getSelection().selectAllChildren($("join"));
    setText($("copied"), "Selected: press Ctrl-C.");
  }
};
new ResizeObserver(draw).observe($("world"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addHeads();
watch();
setInterval(() => load().catch(() => setLive(false)), RELOAD_MS);
fetch("/map/static/land-110m.json").then((answer) => answer.json()).then((data) => { land = data.polygons; draw(); });
