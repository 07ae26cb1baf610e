// The page's state in the fragment of its address: the browser does not send it to the server, and it may be long.

export const START = {
  model: "", lens: "mat", other: "", colour: "probability", text: "", level: null, column: null, pins: [], strength: 0.9,
  rule: "gap:0.9", count: 48, cache: "exact", lossless: false,
};
export const CACHES = { exact: "exact (computed later)", copy: "copied exit state", jump: "predicted by a jump" };
const RULE = /^(never|calibrated|gap:(0|1|0\.\d{1,4}|1\.0{1,4})|fixed:\d{1,4})$/;

export function fromHash(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const at = /^(\d{1,6}),(\d{1,6})$/.exec(given.get("at") ?? "");
  const strength = Number(given.get("exit") ?? START.strength);
  const count = Number(given.get("new") ?? START.count);
  return {
    model: given.get("model") ?? START.model,
    lens: given.get("lens") ?? START.lens,
    other: given.get("with") ?? START.other,
    colour: given.get("colour") ?? START.colour,
    text: given.get("text") ?? START.text,
    level: at ? Number(at[1]) : null,
    column: at ? Number(at[2]) : null,
    pins: given.getAll("pin").filter((id) => /^\d{1,9}$/.test(id)).map(Number).slice(0, 16),
    strength: strength >= 0 && strength <= 1.12 ? strength : START.strength,
    rule: RULE.test(given.get("rule") ?? "") ? given.get("rule") : START.rule,
    count: Number.isInteger(count) && count >= 1 && count <= 9999 ? count : START.count,
    cache: given.get("cache") in CACHES ? given.get("cache") : START.cache,
    lossless: given.get("lossless") === "yes",
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
  written.set("text", state.text);
  return `#${written}`;
}
