"use strict";

const byId = (id) => document.getElementById(id);
let schema = null;
let token = "";

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function complain(sentence) {
  byId("error").textContent = sentence || "";
  byId("error").hidden = !sentence;
}

async function ask(path, content) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const options = { headers, cache: "no-store" };
  if (content) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(content) });
  }
  const answer = await fetch(path, options);
  return { status: answer.status, body: await answer.json() };
}

function field(column, index) {
  const box = element("div");
  const label = element("label", column.name);
  const choice = column.kind === "words" && column.words.length <= 200;
  const input = element(choice ? "select" : "input");
  input.id = "field-" + index;
  label.htmlFor = input.id;
  if (choice) {
    input.append(new Option("(missing)", ""));
    column.words.forEach((word) => input.append(new Option(word, word)));
  } else if (column.kind === "number") {
    input.inputMode = "decimal";
  }
  box.append(label, input);
  const codes = column.kind === "number" ? column.words : [];
  const range = column.usual ? "mostly " + column.usual[0] + " to " + column.usual[1] : "";
  const seen = codes.length ? codes.slice(0, 12).join(", ") + (codes.length > 12 ? ", …" : "") : range;
  const hint = seen ? "training: " + seen : "";
  const empty = column.always ? (hint ? "; never missing" : "never missing in training") : "";
  if (hint || empty) {
    const said = element("p", hint + empty, "hint");
    said.id = input.id + "-hint";
    input.setAttribute("aria-describedby", said.id);
    box.append(said);
  }
  return box;
}

function value(column, text) {
  const word = text.trim();
  if (word === "") return null;
  if (column.kind !== "number") return word;
  const number = /^[-+0-9.eE]+$/.test(word) ? Number(word) : NaN;
  if (!Number.isFinite(number)) {
    throw new Error("“" + word.slice(0, 40) + "” in " + column.name + " is not a number; write decimals with a point.");
  }
  return number;
}

function digits(number) {
  return number === null ? "no bound" : String(Number(number.toPrecision(4)));
}

function title(name) {
  const level = /^(set|surely|possibly|low|high)\((.*)\)$/.exec(name);
  if (level) return (level[1] === "set" ? "prediction set" : level[1]) + " at level " + level[2];
  const nats = schema.labels.length && ["total", "epistemic", "aleatoric"].includes(name);
  return nats ? name + " uncertainty (nats)" : name;
}

function bar(name, share) {
  const box = element("div", undefined, "bar");
  const line = element("div");
  line.append(element("span", name), element("span", (100 * share).toFixed(1) + " %"));
  const progress = element("progress");
  progress.max = 1;
  progress.value = share;
  progress.setAttribute("aria-label", name);
  box.append(line, progress);
  return box;
}

function show(row) {
  const bars = schema.labels.filter((label) => "p(" + label + ")" in row).map((label) => [label, row["p(" + label + ")"]]);
  bars.sort((a, b) => b[1] - a[1]);
  byId("bars").replaceChildren(...bars.slice(0, 20).map(([label, share]) => bar(label, share)));
  const abstains = row.abstain === "yes";
  let headline = schema.target + ": ";
  if ("label" in row) headline += abstains ? "abstains (most probable: " + row.label + ")" : row.label;
  else if ("labels" in row) headline += row.labels || "none";
  else if ("mean" in row) headline += digits(row.mean) + " ± " + digits(row.sd);
  else headline += "risk " + digits(row.risk);
  byId("headline").textContent = headline;
  const list = byId("numbers");
  list.replaceChildren();
  for (const [name, content] of Object.entries(row)) {
    if (name.startsWith("p(") || ["label", "labels", "set", "unusual", "abstain"].includes(name)) continue;
    const line = element("div");
    const isSet = name.startsWith("set(") && Array.isArray(row.set);
    const text = isSet ? row.set.join(", ") || "empty: no label fits" : typeof content === "string" ? content || "none" : digits(content);
    line.append(element("dt", title(name)), element("dd", text, typeof content === "string" ? "words" : ""));
    list.append(line);
  }
  const strange = row.unusual.map((each) => element("p", each.column + ": " + each.why, "warning"));
  byId("unusual").replaceChildren(...strange);
  byId("answer").hidden = false;
}

async function predict(event) {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  complain("");
  try {
    const row = {};
    schema.columns.forEach((column, index) => { row[column.name] = value(column, byId("field-" + index).value); });
    const { status, body } = await ask("/predict", { rows: [row] });
    if (status !== 200) throw new Error(body.error);
    show(body.rows[0]);
  } catch (error) {
    byId("answer").hidden = true;
    complain(error.message);
  }
  button.disabled = false;
}

async function open() {
  const { status, body } = await ask("/schema");
  byId("key").hidden = status !== 401;
  if (status === 401) {
    if (token) complain(body.error);
    return;
  }
  if (status !== 200) return complain(body.error);
  complain("");
  schema = body;
  byId("title").textContent = "Predict " + schema.target + " with the model of " + schema.client;
  byId("about").textContent = schema.method + ", " + schema.task + ", bpfed " + schema.bpfed + ". Nothing that you enter is kept.";
  byId("fields").replaceChildren(...schema.columns.map(field));
  byId("work").hidden = false;
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  open().catch((error) => complain(error.message));
});
byId("row").addEventListener("submit", predict);
open().catch((error) => complain(error.message));
