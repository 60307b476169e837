"use strict";
(() => {
  const list = document.getElementById("documents");
  const done = document.getElementById("done");
  const articles = Array.from(list.querySelectorAll("article"));
  const looked = (article) => article.querySelector(".looked");
  const say = () => {
    const count = articles.filter((article) => looked(article).checked).length;
    done.textContent = `${count} of ${articles.length} reviewed`;
    return count;
  };
  const cell = (text) => {
    // As `harmless` of review.py.
    const formula = /^['+\-]|^\s*[=@+\-\uff1d\uff20\uff0b\uff0d\t\r]/;
    const harmless = formula.test(text) ? `'${text}` : text;
    return `"${harmless.replaceAll('"', '""')}"`;
  };
  const parsed = (text) => {
    try { return JSON.parse(text); } catch { return null; }
  };
  // The items of a list that are not texts (numbers, true) keep their type.
  const typed = (text, kinds) => {
    const value = parsed(text);
    return kinds.has(typeof value) && typeof value !== "string" ? value : text;
  };
  // Only an answer that is no value has this box: without it, an empty value is null.
  const absent = (field) => field.querySelector(".absent");
  const valueOf = (field) => {
    const { kind, value } = field.dataset;
    const boxes = Array.from(field.querySelectorAll(".box"), (box) => box.value);
    if (absent(field)?.checked) return field.dataset.null;
    if (kind !== "list") {
      const text = boxes[0];
      return text === value.replace(/[\r\n]/g, "") ? value : text;  // a box holds no line break
    }
    const before = parsed(value);
    const items = Array.isArray(before) ? before : [];
    const kinds = new Set(items.map((item) => typeof item));
    const filled = boxes.filter((text) => text.trim());
    const now = filled.map((text) => typed(text, kinds));
    const same = JSON.stringify(now) === JSON.stringify(items);
    if (same) return value;
    return now.length ? JSON.stringify(now) : "";
  };
  // The review is kept in the browser, so that a page that is loaded again still has it.
  const key = `raypd review ${list.dataset.run}`;
  const nameOf = (article) => JSON.stringify([article.dataset.source, article.dataset.row]);
  const fieldsOf = (article) => Array.from(article.querySelectorAll(".field"));
  let lost = false;  // whether the review would be lost with the page
  const kept = () => {
    try { return JSON.parse(localStorage.getItem(key)) || {}; } catch { return {}; }
  };
  const keep = (article) => {
    const boxes = {};
    const absents = [];
    for (const field of fieldsOf(article)) {
      if (absent(field)?.checked) absents.push(field.dataset.name);
      boxes[field.dataset.name] = Array.from(field.querySelectorAll(".box"), (box) => box.value);
    }
    const state = kept();
    state[nameOf(article)] = { looked: looked(article).checked, boxes, absents };
    try {
      localStorage.setItem(key, JSON.stringify(state));
    } catch {
      lost = true;
    }
  };
  window.addEventListener("beforeunload", (event) => {
    if (lost) event.preventDefault();
  });
  const reviewed = (article) => { looked(article).checked = true; keep(article); say(); };
  const addItem = (field) => {
    const item = document.createElement("span");
    item.className = "item";
    const box = document.createElement("input");
    box.type = "text";
    box.className = "box";
    box.autocomplete = "off";
    box.setAttribute("aria-label", `${field.dataset.name}, new item`);
    if (field.dataset.pattern) box.pattern = field.dataset.pattern;
    const drop = document.createElement("button");
    drop.type = "button";
    drop.className = "drop";
    drop.textContent = "×";
    drop.setAttribute("aria-label", "Remove this item");
    item.append(box, drop);
    field.querySelector(".more").before(item);
    return box;
  };
  const restore = (article, state) => {
    looked(article).checked = state.looked === true;
    for (const field of fieldsOf(article)) {
      if (absent(field)) absent(field).checked = !!state.absents?.includes(field.dataset.name);
      const texts = state.boxes?.[field.dataset.name];
      if (!Array.isArray(texts)) continue;
      if (field.dataset.kind === "list") {
        for (const item of field.querySelectorAll(".item")) item.remove();
        for (const text of texts) addItem(field).value = text;
      } else if (texts.length) {
        field.querySelector(".box").value = texts[0];
      }
    }
  };
  const advance = (article) => {
    reviewed(article);
    const next = articles[articles.indexOf(article) + 1];
    if (!next) { document.getElementById("save").focus(); return; }
    next.scrollIntoView({ block: "start" });
    next.querySelector(".box")?.focus({ preventScroll: true });
  };
  for (const article of articles) {
    // Who changes a value has looked.
    article.addEventListener("input", (event) => {
      const field = event.target.closest(".field");
      if (event.target.classList.contains("box")) {
        if (absent(field)) absent(field).checked = false;
        reviewed(article);
      }
      if (event.target.classList.contains("absent")) {
        if (event.target.checked) {
          for (const item of field.querySelectorAll(".item")) item.remove();
          for (const box of field.querySelectorAll(".box")) box.value = "";
        }
        reviewed(article);
      }
    });
    article.addEventListener("keydown", (event) => {
      const inBox = event.target.classList.contains("box");
      if (event.key !== "Enter" || !inBox || event.isComposing) return;
      event.preventDefault();
      advance(article);
    });
    article.addEventListener("click", (event) => {
      if (event.target.classList.contains("drop")) {
        event.target.closest(".item").remove();
        reviewed(article);
      }
      if (event.target.classList.contains("more")) {
        addItem(event.target.closest(".field")).focus();
      }
    });
  }
  list.addEventListener("change", (event) => {
    keep(event.target.closest("article"));
    say();
  });
  document.getElementById("save").addEventListener("click", () => {
    if (!say()) { done.textContent = "nothing is reviewed yet"; return; }
    const lines = [list.dataset.columns];
    let open = 0;
    for (const article of articles.filter((a) => looked(a).checked)) {
      const { source, row, id, category, chosen } = article.dataset;
      for (const field of article.querySelectorAll(".field")) {
        const { name, value, sure, status, raw } = field.dataset;
        const correct = valueOf(field);
        const answer = [name, value, correct, sure, status, raw];
        if (absent(field) && !absent(field).checked && !correct.trim()) open += 1;
        const cells = [source, row, id, category, ...answer, "x", chosen];
        lines.push(cells.map(cell).join(","));
      }
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`\ufeff${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
    link.download = "review.csv";
    link.click();
    URL.revokeObjectURL(link.href);
    const wrong = list.querySelectorAll("article:has(.looked:checked) .box:invalid").length;
    if (open) done.textContent += `; ${open} without a label, because the answer is no value and none was typed`;
    if (wrong) done.textContent += `; ${wrong} not in the form of their type (red)`;
    lost = false;
  });
  const before = kept();
  for (const article of articles) {
    const state = before[nameOf(article)];
    if (state) restore(article, state);
  }
  say();
})();
