"use strict";
(() => {
  const PAGE = 25;

  // The rows: searched, sorted and paged here; without this script the table shows all of them.
  function rowsTable() {
    const table = document.getElementById("rows-table");
    if (!table) return;
    const body = table.tBodies[0];
    const find = (id) => document.getElementById(id);
    const search = find("rows-search"), status = find("rows-status");
    const rows = Array.from(body.rows, (row, place) => ({
      row, place, text: row.textContent.toLowerCase(), bad: row.classList.contains("bad"),
    }));
    let shown = rows, page = 0;

    function show() {
      const pages = Math.max(1, Math.ceil(shown.length / PAGE));
      page = Math.min(Math.max(page, 0), pages - 1);
      const here = shown.slice(page * PAGE, (page + 1) * PAGE);
      body.replaceChildren(...here.map((one) => one.row));
      find("rows-count").textContent =
        shown.length === rows.length ? "" : `${shown.length.toLocaleString("en")} found`;
      find("rows-page").textContent = `page ${page + 1} of ${pages.toLocaleString("en")}`;
      find("rows-previous").disabled = page === 0;
      find("rows-next").disabled = page === pages - 1;
      find("rows-pager").hidden = pages === 1;
    }

    function choose() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      shown = rows.filter((one) =>
        (!status.value || one.bad === (status.value === "bad")) &&
        words.every((word) => one.text.includes(word)));
      page = 0;
      show();
    }

    function sortable(head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      const numbers = head.dataset.sort === "number";
      const key = (one) => {
        const cell = one.row.cells[column];
        return numbers ? Number(cell.dataset.value ?? Infinity) : cell.textContent;
      };
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const order = (a, b) => numbers ? a - b : a.localeCompare(b, "en", { numeric: true });
        const keys = new Map(rows.map((one) => [one, key(one)]));
        rows.sort((a, b) =>
          (down ? -1 : 1) * order(keys.get(a), keys.get(b)) || a.place - b.place);
        choose();
      });
    }

    Array.from(table.tHead.rows[0].cells).forEach(sortable);
    search.addEventListener("input", choose);
    status.addEventListener("change", choose);
    find("rows-previous").addEventListener("click", () => { page -= 1; show(); });
    find("rows-next").addEventListener("click", () => { page += 1; show(); });
    find("rows-controls").hidden = false;
    show();
  }

  // Where a player is, in the figures over time beside it; a click there moves it.
  function players() {
    for (const example of document.querySelectorAll(".example")) {
      const audio = example.querySelector("audio");
      if (!audio) continue;
      const areas = Array.from(example.querySelectorAll("[data-on-time]"));
      const seconds = Number(audio.dataset.seconds);
      const draw = () => {
        const place = `${Math.min(100, 100 * audio.currentTime / seconds)}%`;
        for (const area of areas) {
          const line = area.querySelector(".playhead");
          line.setAttribute("x1", place);
          line.setAttribute("x2", place);
        }
        example.classList.toggle("played", audio.currentTime > 0);
        if (!audio.paused) requestAnimationFrame(draw);
      };
      audio.addEventListener("play", draw);
      audio.addEventListener("seeked", draw);
      audio.addEventListener("play", () => {
        for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause();
      });
      for (const area of areas) {
        area.addEventListener("click", (event) => {
          const box = area.getBoundingClientRect();
          audio.currentTime = seconds * (event.clientX - box.left) / box.width;
        });
      }
    }
  }

  rowsTable();
  players();
})();
