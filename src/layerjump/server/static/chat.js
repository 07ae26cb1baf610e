// The chat box: messages with their roles, in place of the prompt of a completion.

import { element } from "./text.js";

const ROLES = ["system", "user", "assistant"];

export class ChatBox {
  // `onSubmit()` for Enter in a message, `onType()` for every change.
  constructor(place, most, { onSubmit, onType }) {
    this.place = place;
    this.most = most;
    this.onSubmit = onSubmit;
    this.onType = onType;
    this.add = element("button", { type: "button", id: "add-message", text: "Add a message" });
    this.add.addEventListener("click", () => this.#append());
    this.list = element("ol", { className: "messages", "aria-label": "Messages" });
    place.replaceChildren(this.list, this.add);
  }

  get messages() {
    return [...this.list.children].map((item) => [item.querySelector("select").value, item.querySelector("textarea").value]);
  }

  set messages(messages) {
    if (JSON.stringify(messages) === JSON.stringify(this.messages)) return; // keeps the cursor where it is
    this.list.replaceChildren(...messages.map(([role, content]) => this.#item(role, content)));
    this.#limit();
  }

  #append() {
    const last = this.messages.at(-1)?.[0];
    const item = this.#item(last === "user" ? "assistant" : "user", "");
    this.list.append(item);
    this.#limit();
    item.querySelector("textarea").focus();
  }

  #item(role, content) {
    const choices = ROLES.includes(role) ? ROLES : [...ROLES, role];
    const select = element("select", {
      "aria-label": "Role", children: choices.map((name) => element("option", { value: name, text: name })),
    });
    select.value = role;
    const text = element("textarea", { rows: "1", maxlength: "20000", dir: "auto", "aria-label": "Message", spellcheck: "false" });
    text.value = content;
    const remove = element("button", { type: "button", className: "pin", "aria-label": "Remove this message", text: "✕" });
    const item = element("li", { children: [select, text, remove] });
    remove.addEventListener("click", () => {
      item.remove();
      this.#limit();
      this.onType();
    });
    select.addEventListener("change", this.onType);
    text.addEventListener("input", this.onType);
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.onSubmit();
    });
    return item;
  }

  #limit() {
    this.add.disabled = this.list.children.length >= this.most;
    for (const button of this.list.querySelectorAll("button")) button.disabled = this.list.children.length < 2;
  }
}

// Messages as the server takes them.
export function toMessages(messages) {
  return messages.map(([role, content]) => ({ role, content }));
}

// The same chat with another last message of the user: how a second prompt is read in a chat.
export function withLastMessage(messages, content) {
  const last = messages.findLastIndex(([role]) => role === "user");
  return messages.map(([role, text], index) => (index === last ? [role, content] : [role, text]));
}
