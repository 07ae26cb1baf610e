// The page's state in the fragment of its address: the browser does not send it to the server, and it may be long.

export const START = {
  model: "", lens: "mat", other: "", colour: "probability", text: "", level: null, column: null, pins: [], strength: 0.9,
  rule: "gap:0.9", count: 48, cache: "exact", lossless: false,
  chat: null, // the messages of a chat, [[role, content], …]; null for a completion
  second: null, // the second prompt; null without one
  secondAt: null, // its selected cell, [level, column]
  what: null, // the intervention whose effect is shown
  race: [], // concepts, each a list of words with commas
  against: "", // the token that an explanation contrasts with
  levels: null, positions: null, role: "", // filters: [first, last], and the role of tokens in a chat
  open: [], // panels
};
export const CACHES = { exact: "exact (computed later)", copy: "copied exit state", jump: "predicted by a jump" };
const PANELS = ["exit", "generate", "filters", "why", "what-if", "most", "race"];
const KINDS = ["swap", "steer", "ablate", "patch"];
const RULE = /^(never|calibrated|gap:(0|1|0\.\d{1,4}|1\.0{1,4})|fixed:\d{1,4})$/;

export function fromHash(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const at = pair(given.get("at"), ",");
  const strength = Number(given.get("exit") ?? START.strength);
  const count = Number(given.get("new") ?? START.count);
  return {
    model: given.get("model") ?? START.model,
    lens: given.get("lens") ?? START.lens,
    other: given.get("with") ?? START.other,
    colour: given.get("colour") ?? START.colour,
    text: given.get("text") ?? START.text,
    level: at ? at[0] : null,
    column: at ? at[1] : null,
    pins: given.getAll("pin").filter((id) => /^\d{1,9}$/.test(id)).map(Number).slice(0, 16),
    strength: strength >= 0 && strength <= 1.12 ? strength : START.strength,
    rule: RULE.test(given.get("rule") ?? "") ? given.get("rule") : START.rule,
    count: Number.isInteger(count) && count >= 1 && count <= 9999 ? count : START.count,
    cache: given.get("cache") in CACHES ? given.get("cache") : START.cache,
    lossless: given.get("lossless") === "yes",
    chat: json(given.get("chat"), isChat),
    second: given.get("second"),
    secondAt: pair(given.get("second-at"), ","),
    what: json(given.get("what"), isIntervention),
    race: given.getAll("race").slice(0, 6),
    against: given.get("against") ?? START.against,
    levels: pair(given.get("levels"), "-"),
    positions: pair(given.get("positions"), "-"),
    role: given.get("role") ?? START.role,
    open: PANELS.filter((name) => given.getAll("open").includes(name)),
  };
}

export function toHash(state) {
  const written = new URLSearchParams({ model: state.model, lens: state.lens });
  if (state.other) written.set("with", state.other);
  if (state.colour !== START.colour) written.set("colour", state.colour);
  if (state.level !== null) written.set("at", `${state.level},${state.column}`);
  for (const id of state.pins) written.append("pin", id);
  if (state.strength !== START.strength) written.set("exit", state.strength);
  if (state.rule !== START.rule) written.set("rule", state.rule);
  if (state.count !== START.count) written.set("new", state.count);
  if (state.cache !== START.cache) written.set("cache", state.cache);
  if (state.lossless) written.set("lossless", "yes");
  if (state.chat) written.set("chat", JSON.stringify(state.chat));
  if (state.second !== null) written.set("second", state.second);
  if (state.second !== null && state.secondAt) written.set("second-at", state.secondAt.join(","));
  if (state.what) written.set("what", JSON.stringify(state.what));
  for (const words of state.race) written.append("race", words);
  if (state.against) written.set("against", state.against);
  if (state.levels) written.set("levels", state.levels.join("-"));
  if (state.positions) written.set("positions", state.positions.join("-"));
  if (state.role) written.set("role", state.role);
  for (const name of state.open) written.append("open", name);
  written.set("text", state.text);
  return `#${written}`;
}

function pair(text, separator) {
  const found = new RegExp(`^(\\d{1,6})${separator}(\\d{1,6})$`).exec(text ?? "");
  return found ? [Number(found[1]), Number(found[2])] : null;
}

// A value in JSON that passes a check; null for anything else, since an address can hold anything.
function json(text, check) {
  try {
    const value = JSON.parse(text);
    return value !== null && check(value) ? value : null;
  } catch {
    return null;
  }
}

function isChat(value) {
  const isMessage = (entry) => Array.isArray(entry) && entry.length === 2 && entry.every((part) => typeof part === "string");
  return Array.isArray(value) && value.length > 0 && value.every(isMessage);
}

function isIntervention(value) {
  const isRange = Array.isArray(value.levels) && value.levels.length === 2 && value.levels.every(Number.isInteger);
  const areTokens = Array.isArray(value.tokens) && value.tokens.every((token) => typeof token === "string");
  const arePositions = value.positions === null || (Array.isArray(value.positions) && value.positions.every(Number.isInteger));
  return KINDS.includes(value.kind) && isRange && areTokens && arePositions;
}
