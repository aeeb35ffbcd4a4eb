// Makes elements. Everything that comes from a pool becomes a text node here, never HTML.

const SVG = "http://www.w3.org/2000/svg";

// h("a.name", {href: "#/"}, "text", element, [more]) -> element
export function h(what, given = {}, ...children) {
  return made(document.createElement.bind(document), what, given, children);
}

export function svg(what, given = {}, ...children) {
  return made((tag) => document.createElementNS(SVG, tag), what, given, children);
}

function made(create, what, given, children) {
  const [tag, ...classes] = what.split(".");
  const element = create(tag || "div");
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "set") Object.assign(element, value);
    else if (name === "vars") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, children);
  return element;
}

export function put(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return element;
}

export function clear(element, ...children) {
  element.replaceChildren();
  return put(element, children);
}

// Control characters and those that turn the direction of text, which would show nothing, or something else.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, (sign) => {
    const code = sign.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// A region that tells what went wrong.
export function trouble(error) {
  return h("p.trouble", { role: "alert" }, error.message || String(error));
}
