"use strict";
(() => {
  const every = 1000 * Number(document.getElementById("live").dataset.every);
  const lost = document.getElementById("live-lost");
  const parts = Array.from(document.querySelectorAll("[data-live]"));
  const seen = new Map(parts.map((part) => [part.id, part.innerHTML]));

  // What a reader has opened stays open, and the keyboard stays where it is.
  function replace(part, next) {
    const open = new Map(
      Array.from(part.querySelectorAll("details[id]"), (one) => [one.id, one.open]));
    const inside = part.contains(document.activeElement) ? document.activeElement : null;
    const holder = inside && inside.closest("[id]");
    part.replaceChildren(...next.childNodes);
    for (const one of part.querySelectorAll("details[id]")) {
      if (open.has(one.id)) one.open = open.get(one.id);
    }
    if (inside && holder !== part) {
      const same = document.getElementById(holder.id);
      const target = same && (same.matches(inside.tagName) ? same : same.querySelector(inside.tagName));
      if (target) target.focus({ preventScroll: true });
    }
  }

  async function update() {
    try {
      const answer = await fetch(location.pathname, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of parts) {
        const next = page.getElementById(part.id);
        if (!next || next.innerHTML === seen.get(part.id)) continue;
        seen.set(part.id, next.innerHTML);
        replace(part, next);
      }
      document.title = page.title;
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
    setTimeout(update, every);
  }

  setTimeout(update, every);
})();
