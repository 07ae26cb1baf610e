// The routes, from the server's OpenAPI description.

import { element } from "./text.js";

const described = await (await fetch("/api/openapi.json")).json();
const { models } = await (await fetch("/api/models")).json();
const model = models[0].name;
const schemas = described.components?.schemas ?? {};

for (const [path, methods] of Object.entries(described.paths)) {
  for (const [method, route] of Object.entries(methods)) document.getElementById("routes").append(section(path, method, route));
}

function section(path, method, route) {
  const title = element("h2", { children: [element("code", { text: `${method.toUpperCase()} ${path}` })] });
  const parts = [title, element("p", { text: route.summary })];
  const reference = route.requestBody?.content["application/json"].schema.$ref;
  if (reference) parts.push(fields(schemas[reference.split("/").at(-1)]), example(path));
  const answers = Object.entries(route.responses).map(([status, { description }]) => `${status}: ${description}`);
  parts.push(element("p", { className: "quiet", text: answers.join(" · ") }));
  return element("section", { className: "card", children: parts });
}

function fields(schema) {
  const rows = Object.entries(schema.properties).map(([name, field]) => {
    const needed = schema.required?.includes(name) ? "required" : `default ${JSON.stringify(field.default)}`;
    const cells = [name, kind(field), needed, limits(field), field.description ?? ""];
    return element("tr", { children: cells.map((text) => element("td", { text })) });
  });
  return element("div", { className: "wide", children: [element("table", { className: "fields", children: rows })] });
}

function kind(field) {
  if (field.type === "array") return `list of ${kind(field.items)}`;
  return field.enum?.join(", ") ?? field.type ?? field.anyOf?.map(kind).join(" or ") ?? "";
}

function limits(field) {
  const names = { minLength: "from", maxLength: "up to", minimum: "from", maximum: "up to", minItems: "from", maxItems: "up to" };
  return Object.entries(names).filter(([key]) => key in field).map(([key, word]) => `${word} ${field[key]}`).join(" ");
}

function example(path) {
  const bodies = {
    "/api/lens": { model, text: "The capital of France is", lenses: ["identity", "mat"], tokens: [" Paris"] },
    "/api/generate": { model, prompt: "The capital of France is", exit: "gap:0.9", max_new_tokens: 16 },
  };
  const body = bodies[path] ?? { model };
  const text = `curl ${location.origin}${path} -H 'Content-Type: application/json' -d '${JSON.stringify(body)}'`;
  return element("pre", { children: [element("code", { text })] });
}
