// The radix tree: a row for each run, with its tokens as a bar on a common axis. Updates reuse the rows.

import { age, byId, count, make, setText, visible } from "./elements.js";

const PAGE_SIZE = 16;
const MAX_ROWS = 400; // drawn at once
const MAX_TICKS = 160; // with more pages, ticks would be a grey blur

export class TreeView {
  // onOpen(run): called to show its text.
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.box = byId("tree");
    this.rows = new Map(); // key of a run -> its row
    this.closed = new Set(); // keys of runs whose children are hidden
    this.focused = null; // key
    this.maxRows = MAX_ROWS;
    this.picture = null;
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".run");
      if (row) this.focus(row.dataset.key, event.target.closest(".twisty") !== null);
      if (row && event.target.closest(".begins")) this.onOpen(this.focusedRun);
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

  // `runs` and `requests` as in /v1/cache; `chosen` is the request whose path is marked.
  show(runs, requests, chosen) {
    this.picture = { runs: keyed(runs), requests, chosen };
    this.draw();
  }

  draw() {
    const { runs, requests, chosen } = this.picture;
    const end = Math.max(PAGE_SIZE, ...runs.map((run) => run.start + run.num_tokens));
    const path = pathTo(runs, chosen); // index of a run -> its tokens on the path
    const running = requests.filter((request) => request.state === "running");
    const shown = runs.filter((run) => !run.above.some((key) => this.closed.has(key)));
    const drawn = shown.slice(0, this.maxRows);
    if (!drawn.some((run) => run.key === this.focused)) this.focused = drawn[0]?.key ?? null;
    const rows = drawn.map((run) => {
      const row = this.rows.get(run.key) ?? runRow(run.key);
      const here = running.filter((request) => request.run === run.place).length;
      update(row, run, end, here);
      row.ariaExpanded = run.below ? String(!this.closed.has(run.key)) : null;
      row.querySelector(".twisty").textContent = run.below ? (this.closed.has(run.key) ? "▸" : "▾") : "";
      row.tabIndex = run.key === this.focused ? 0 : -1;
      row.classList.toggle("on-path", path.has(run.place));
      row.classList.toggle("end", chosen?.run === run.place);
      showLanes(row, path.has(run.place) ? lanesOf(run, path.get(run.place), chosen) : [], end);
      return row;
    });
    place(this.box, rows);
    this.rows = new Map(rows.map((row) => [row.dataset.key, row]));
    this.more.hidden = shown.length <= drawn.length;
    setText(this.more, `Show ${Math.min(MAX_ROWS, shown.length - drawn.length)} more of ${shown.length} runs`);
    setText(byId("scale"), runs.length ? `all bars share one axis, 0 to ${end.toLocaleString("en")} tokens; a tick marks a page of ${PAGE_SIZE}` : "");
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

  get focusedRun() {
    return this.picture.runs.find((run) => run.key === this.focused);
  }

  move(event) {
    const keys = [...this.rows.keys()];
    const at = keys.indexOf(this.focused);
    if (at < 0) return;
    const run = this.focusedRun;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault(); // the key would press a button of the dialog
      return this.onOpen(run);
    }
    const isOpen = run.below > 0 && !this.closed.has(run.key);
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

// Return the runs in display order, with keys that are stable across updates. Below a run are those that continue it,
// and those that share its first tokens: `shared` of them, which are copied to a page of their own.
function keyed(runs) {
  const all = runs.map((run, place) => ({ ...run, place, under: run.parent, shared: 0, children: [] }));
  const roots = [];
  const siblings = new Map(); // parent -> runs that a sibling may branch from: each shares more tokens than the one before
  for (const run of all) {
    const open = siblings.get(run.parent) ?? [];
    siblings.set(run.parent, open);
    while (open.length && open.at(-1).num_shared > run.num_shared) open.pop();
    const last = open.at(-1);
    const isBeside = last?.num_shared === run.num_shared; // both branch at the same token
    if (isBeside) open.pop();
    if (run.num_shared) {
      run.shared = run.num_shared;
      run.under = isBeside ? last.under : last.place;
    }
    open.push(run);
    (run.under === null ? roots : all[run.under].children).push(run);
  }
  const ordered = [];
  const taken = new Set();
  const stack = roots.map((run) => [run, "", [], 0]).reverse();
  while (stack.length) {
    const [run, parentKey, above, depth] = stack.pop();
    const sibling = run.begins === null ? run.place : run.begins;
    run.key = `${parentKey}/${run.start}:${sibling}`;
    while (taken.has(run.key)) run.key += "'"; // siblings whose text begins alike in different tokens
    taken.add(run.key);
    run.above = above;
    run.depth = depth;
    run.below = run.children.length;
    ordered.push(run);
    const children = run.children.toSorted((one, other) => one.start + one.shared - other.start - other.shared);
    const isBranch = children.length > 1;
    for (const child of children.reverse()) stack.push([child, run.key, [...above, run.key], depth + (isBranch || child.shared ? 1 : 0.4)]);
  }
  return ordered;
}

// Return the path of a request: for each run on it, the tokens [start, end) that belong to the request.
function pathTo(runs, chosen) {
  const byPlace = new Map(runs.map((run) => [run.place, run]));
  const path = new Map();
  let end = Infinity;
  for (let run = byPlace.get(chosen?.run); run; run = byPlace.get(run.under)) {
    const start = run.start + run.shared;
    if (start < end) path.set(run.place, [start, end]);
    end = Math.min(end, start);
  }
  return path;
}

function runRow(key) {
  const nums = make("span", "nums", make("span", "tok"), make("span", "pages"), make("span", "gen"), make("span", "age"));
  const head = make("div", "head", make("span", "twisty"), make("span", "begins"), make("span", "here"), nums);
  const bar = make("div", "bar", make("div", "made"), make("div", "copied"), make("div", "ticks"));
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
  const text = run.begins === null ? "(text is hidden)" : visible(run.shared ? run.begins_after : run.begins);
  setText(find(".begins"), text);
  setText(find(".here"), numHere ? count(numHere, "request") + " here" : run.num_users ? `${run.num_users} through here` : "");
  find(".here").classList.toggle("through", !numHere);
  setText(find(".tok"), `${run.num_tokens} tok`);
  setText(find(".pages"), count(run.num_pages, "page"));
  setText(find(".gen"), run.num_generated ? `${generated}% gen` : "");
  setText(find(".age"), run.num_users ? "in use" : age(run.unused_s));
  row.title = [
    text,
    ...(run.shared ? [`its first ${count(run.shared, "token")} equal those of the run above: pages have ${PAGE_SIZE} tokens, and each branch has its own copy`] : []),
    `tokens ${run.start} to ${run.start + run.num_tokens}, in ${count(run.num_pages, "page")}${run.num_states ? `, with ${count(run.num_states, "state")}` : ""}`,
    `${run.num_generated} generated, ${run.num_tokens - run.num_generated} written by a client`,
    run.num_users ? count(run.num_users, "running request") + " on it" : `not used for ${age(run.unused_s)}`,
  ].join("\n");
  const bar = find(".bar");
  bar.style.left = share(run.start);
  bar.style.width = share(run.num_tokens);
  bar.style.opacity = String(run.num_users ? 1 : Math.max(0.45, 1 - Math.log10(1 + run.unused_s) / 6));
  find(".before").style.width = share(run.start);
  find(".copied").style.width = `${(100 * run.shared) / run.num_tokens}%`;
  find(".made").style.width = `${generated}%`;
  const page = (100 * PAGE_SIZE) / run.num_tokens;
  const hasTicks = run.num_tokens > PAGE_SIZE && end / PAGE_SIZE <= MAX_TICKS;
  find(".ticks").style.background = hasTicks ? `repeating-linear-gradient(90deg, transparent 0 calc(${page}% - 1px), var(--panel) calc(${page}% - 1px) ${page}%)` : "";
}

// Return the tokens of a run that the selected request reused, computed and generated: [class, start, end).
function lanesOf(run, [from, to], request) {
  const prompt = request.num_prompt_tokens;
  const cuts = [
    ["hit", 0, request.num_cached_tokens],
    ["computed", request.num_cached_tokens, prompt],
    ["generated", prompt, prompt + request.num_generated_tokens],
  ];
  return cuts
    .map(([kind, start, end]) => [kind, Math.max(start, from), Math.min(end, to, run.start + run.num_tokens)])
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

// Make `rows` the children of `box`, moving as few as possible, so that focus stays.
function place(box, rows) {
  const wanted = new Set(rows);
  for (const child of [...box.children]) if (!wanted.has(child)) child.remove();
  rows.forEach((row, index) => {
    if (box.children[index] !== row) box.insertBefore(row, box.children[index] ?? null);
  });
}
