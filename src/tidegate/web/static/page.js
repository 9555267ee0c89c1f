// What a page does beyond showing: copy a command, follow what happens. Everything else works without this file.
"use strict";

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(document.getElementById(button.dataset.copy));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected: copy it";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

// A live part is the same part of the same page, fetched anew when the server says that something changed; charts take
// what the event itself says.
const live = document.querySelector("[data-live]");
if (live && window.EventSource) {
  let source = null, known = null, busy = false;
  const follow = () => {
    source = new EventSource(live.dataset.live);
    source.onmessage = async (event) => {
      window.tidegateCharts?.feed(JSON.parse(event.data));
      if (known === null || event.lastEventId === known || busy) { known ??= event.lastEventId; return; }
      known = event.lastEventId;
      busy = true;
      try {
        const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
        for (const part of document.querySelectorAll("[data-part]")) {
          const fresh = page.querySelector(`[data-part="${part.dataset.part}"]`);
          if (fresh && fresh.innerHTML !== part.innerHTML) { part.replaceChildren(...fresh.childNodes); part.classList.add("fresh"); }
        }
      } catch { /* the next event tries again */ } finally { busy = false; }
    };
  };
  follow();
  document.addEventListener("visibilitychange", () => { source.close(); if (!document.hidden) follow(); });
}

// Tail: new rows on top of the table, as text; at most 200 stay.
const tail = document.querySelector("[data-tail]");
if (tail && window.EventSource) {
  const button = document.getElementById("tail");
  let source = null;
  const cell = (text, kind) => { const td = document.createElement("td"); if (kind) td.className = kind; td.textContent = text; return td; };
  const code = (found) => { const td = document.createElement("td"); td.className = "wide"; const c = document.createElement("code"); c.textContent = found.kind === "null" ? "null" : found.text; td.append(c); return td; };
  button.hidden = false;
  button.addEventListener("click", () => {
    if (source) { source.close(); source = null; button.textContent = "Follow"; button.setAttribute("aria-pressed", "false"); return; }
    button.textContent = "Following: stop";
    button.setAttribute("aria-pressed", "true");
    source = new EventSource(tail.dataset.tail);
    source.onmessage = (event) => {
      for (const record of JSON.parse(event.data).records) {
        const row = document.createElement("tr");
        row.className = "fresh";
        const at = document.createElement("a");
        at.href = `${location.pathname}/${record.partition}/${record.offset}`;
        at.textContent = record.offset;
        const place = cell("", "n");
        place.append(at);
        row.append(cell(record.partition, "n"), place, cell(record.time, ""), code(record.shown_key), code(record.value), cell("", ""));
        tail.prepend(row);
      }
      while (tail.rows.length > 200) tail.deleteRow(-1);
    };
  });
}

// A check that is under way: ask again until it is done.
const again = () => {
  const part = document.querySelector("[data-again]");
  if (!part) return;
  setTimeout(async () => {
    try {
      const page = new DOMParser().parseFromString(await (await fetch(location.pathname)).text(), "text/html");
      const fresh = page.getElementById(part.id);
      if (fresh) part.replaceWith(fresh);
    } catch { /* tried again below */ }
    again();
  }, Number(part.dataset.again));
};
again();
