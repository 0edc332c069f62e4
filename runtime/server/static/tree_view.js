// The radix tree: a row for each run, its tokens as a bar on one axis. Rows are kept from picture to picture.

import { age, byId, count, make, setText, visible } from "./elements.js";

const PAGE_SIZE = 16;
const MAX_ROWS = 400; // drawn at once
const MAX_TICKS = 160; // more pages than that side by side are a grey blur

export class TreeView {
  constructor() {
    this.box = byId("tree");
    this.rows = new Map(); // key of a run -> its row
    this.closed = new Set(); // keys of runs whose children are hidden
    this.focused = null; // key
    this.maxRows = MAX_ROWS;
    this.picture = null;
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".run");
      if (row) this.focus(row.dataset.key, event.target.closest(".twisty") !== null);
    });
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.more = make("button", "quiet more", "Show more");
    this.more.type = "button";
    this.more.addEventListener("click", () => {
      this.maxRows += MAX_ROWS;
      this.draw();
    });
    this.box.after(this.more);
  }

  // `runs` and `requests` as the server has them; `chosen` is the request whose way is marked.
  show(runs, requests, chosen) {
    this.picture = { runs: keyed(runs), requests, chosen };
    this.draw();
  }

  draw() {
    const { runs, requests, chosen } = this.picture;
    const end = Math.max(PAGE_SIZE, ...runs.map((run) => run.start + run.num_tokens));
    const path = pathTo(runs, chosen);
    const running = requests.filter((request) => request.state === "running");
    const shown = runs.filter((run) => !run.above.some((key) => this.closed.has(key)));
    const drawn = shown.slice(0, this.maxRows);
    if (!drawn.some((run) => run.key === this.focused)) this.focused = drawn[0]?.key ?? null;
    const rows = drawn.map((run) => {
      const row = this.rows.get(run.key) ?? runRow(run.key);
      const here = running.filter((request) => request.run === run.place).length;
      update(row, run, end, here);
      row.ariaExpanded = run.num_children ? String(!this.closed.has(run.key)) : null;
      row.querySelector(".twisty").textContent = run.num_children ? (this.closed.has(run.key) ? "▸" : "▾") : "";
      row.tabIndex = run.key === this.focused ? 0 : -1;
      row.classList.toggle("on-path", path.has(run.place));
      row.classList.toggle("end", chosen?.run === run.place);
      showLanes(row, path.has(run.place) ? lanesOf(run, chosen) : [], end);
      return row;
    });
    place(this.box, rows);
    this.rows = new Map(rows.map((row) => [row.dataset.key, row]));
    this.more.hidden = shown.length <= drawn.length;
    setText(this.more, `Show ${Math.min(MAX_ROWS, shown.length - drawn.length)} more of ${shown.length} runs`);
    setText(byId("scale"), runs.length ? `bars lie on one axis, 0 to ${end.toLocaleString("en")} tokens; a tick is a page of ${PAGE_SIZE}` : "");
    byId("tree-empty").hidden = runs.length > 0;
  }

  focus(key, toggles = false) {
    this.focused = key;
    if (toggles) this.toggle(key);
    else this.draw();
    this.rows.get(key)?.focus({ preventScroll: toggles });
  }

  toggle(key) {
    if (!this.closed.delete(key)) this.closed.add(key);
    this.draw();
  }

  move(event) {
    const keys = [...this.rows.keys()];
    const at = keys.indexOf(this.focused);
    if (at < 0) return;
    const run = this.picture.runs.find((one) => one.key === this.focused);
    const isOpen = run.num_children > 0 && !this.closed.has(run.key);
    const to = {
      ArrowDown: () => keys[at + 1],
      ArrowUp: () => keys[at - 1],
      Home: () => keys[0],
      End: () => keys.at(-1),
      ArrowRight: () => (isOpen ? keys[at + 1] : (this.closed.has(run.key) && this.toggle(run.key), run.key)),
      ArrowLeft: () => (isOpen ? (this.toggle(run.key), run.key) : run.above.at(-1)),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.focus(to() ?? this.focused);
  }
}

// Runs in the order of reading, children below what they go on from, with keys that stay from picture to picture.
function keyed(runs) {
  const all = runs.map((run, place) => ({ ...run, place, children: [] }));
  const roots = [];
  for (const run of all) (run.parent === null ? roots : all[run.parent].children).push(run);
  const ordered = [];
  const taken = new Set();
  const stack = roots.map((run) => [run, "", [], 0]).reverse();
  while (stack.length) {
    const [run, parentKey, above, depth] = stack.pop();
    const sibling = run.begins === null ? run.place : run.begins;
    run.key = `${parentKey}/${run.start}:${sibling}`;
    while (taken.has(run.key)) run.key += "'"; // siblings that begin with the same text in other tokens
    taken.add(run.key);
    run.above = above;
    run.depth = depth;
    ordered.push(run);
    const isBranch = run.children.length > 1;
    for (const child of run.children.toReversed()) stack.push([child, run.key, [...above, run.key], depth + (isBranch ? 1 : 0.4)]);
  }
  return ordered;
}

function pathTo(runs, chosen) {
  const byPlace = new Map(runs.map((run) => [run.place, run]));
  const path = new Set();
  for (let run = byPlace.get(chosen?.run); run; run = byPlace.get(run.parent)) path.add(run.place);
  return path;
}

function runRow(key) {
  const nums = make("span", "nums", make("span", "tok"), make("span", "pages"), make("span", "gen"), make("span", "age"));
  const head = make("div", "head", make("span", "twisty"), make("span", "begins"), make("span", "here"), nums);
  const bar = make("div", "bar", make("div", "made"), make("div", "ticks"));
  const row = make("div", "run", head, make("div", "track", make("div", "before"), bar));
  row.dataset.key = key;
  row.role = "treeitem";
  return row;
}

function update(row, run, end, numHere) {
  const find = (name) => row.querySelector(name);
  const share = (tokens) => `${(100 * tokens) / end}%`;
  const generated = Math.round((100 * run.num_generated) / run.num_tokens);
  row.ariaLevel = String(run.above.length + 1);
  row.classList.toggle("used", run.num_users > 0);
  find(".head").style.paddingLeft = `${Math.min(run.depth, 14) * 0.8}em`;
  const text = run.begins === null ? "(text is not told here)" : visible(run.begins);
  setText(find(".begins"), text);
  setText(find(".here"), numHere ? count(numHere, "request") + " here" : run.num_users ? `${run.num_users} through here` : "");
  find(".here").classList.toggle("through", !numHere);
  setText(find(".tok"), `${run.num_tokens} tok`);
  setText(find(".pages"), count(run.num_pages, "page"));
  setText(find(".gen"), run.num_generated ? `${generated}% gen` : "");
  setText(find(".age"), run.num_users ? "in use" : age(run.unused_s));
  row.title = [
    text,
    `tokens ${run.start} to ${run.start + run.num_tokens}, in ${count(run.num_pages, "page")}${run.num_states ? `, with ${count(run.num_states, "state")}` : ""}`,
    `${run.num_generated} generated, ${run.num_tokens - run.num_generated} written by a client`,
    run.num_users ? count(run.num_users, "running request") + " on it" : `not used for ${age(run.unused_s)}`,
  ].join("\n");
  const bar = find(".bar");
  bar.style.left = share(run.start);
  bar.style.width = share(run.num_tokens);
  bar.style.opacity = String(run.num_users ? 1 : Math.max(0.45, 1 - Math.log10(1 + run.unused_s) / 6));
  find(".before").style.width = share(run.start);
  find(".made").style.width = `${generated}%`;
  const page = (100 * PAGE_SIZE) / run.num_tokens;
  const hasTicks = run.num_tokens > PAGE_SIZE && end / PAGE_SIZE <= MAX_TICKS;
  find(".ticks").style.background = hasTicks ? `repeating-linear-gradient(90deg, transparent 0 calc(${page}% - 1px), var(--panel) calc(${page}% - 1px) ${page}%)` : "";
}

// What of a run the chosen request reused, computed and generated: [class, start, end) in tokens.
function lanesOf(run, request) {
  const prompt = request.num_prompt_tokens;
  const cuts = [
    ["hit", 0, request.num_cached_tokens],
    ["computed", request.num_cached_tokens, prompt],
    ["generated", prompt, prompt + request.num_generated_tokens],
  ];
  return cuts
    .map(([kind, start, end]) => [kind, Math.max(start, run.start), Math.min(end, run.start + run.num_tokens)])
    .filter(([, start, end]) => end > start);
}

function showLanes(row, lanes, end) {
  const track = row.querySelector(".track");
  for (const lane of track.querySelectorAll(".lane")) lane.remove();
  for (const [kind, start, stop] of lanes) {
    const lane = make("div", `lane ${kind}`);
    lane.style.left = `${(100 * start) / end}%`;
    lane.style.width = `${(100 * (stop - start)) / end}%`;
    track.append(lane);
  }
}

// Make `rows` the children of `box`, moving as few as may be, so that focus stays.
function place(box, rows) {
  const wanted = new Set(rows);
  for (const child of [...box.children]) if (!wanted.has(child)) child.remove();
  rows.forEach((row, index) => {
    if (box.children[index] !== row) box.insertBefore(row, box.children[index] ?? null);
  });
}
