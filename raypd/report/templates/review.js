"use strict";
(() => {
  const list = document.getElementById("documents");
  const done = document.getElementById("done");
  const articles = Array.from(list.querySelectorAll("article"));
  const say = () => {
    const looked = articles.filter((article) => article.querySelector(".looked").checked).length;
    done.textContent = `${looked} of ${articles.length} looked at`;
    return looked;
  };
  const cell = (text) => {
    // As `harmless` of review.py.
    const formula = /^['+\-]|^\s*[=@+\-\uff1d\uff20\uff0b\uff0d\t\r]/;
    const harmless = formula.test(text) ? `'${text}` : text;
    return `"${harmless.replaceAll('"', '""')}"`;
  };
  for (const article of articles) {  // who changes a value has looked
    for (const box of article.querySelectorAll(".box")) {
      box.addEventListener("input", () => { article.querySelector(".looked").checked = true; say(); });
    }
  }
  list.addEventListener("change", say);
  document.getElementById("save").addEventListener("click", () => {
    if (!say()) { done.textContent = "nothing is ticked yet"; return; }
    const lines = [list.dataset.columns];
    for (const article of articles.filter((a) => a.querySelector(".looked").checked)) {
      const { source, row, id, category } = article.dataset;
      for (const box of article.querySelectorAll(".box")) {
        const { name, value, sure } = box.dataset;
        const same = box.value === value.replace(/[\r\n]/g, "");  // a box holds no line break
        lines.push([source, row, id, category, name, value, same ? value : box.value, sure].map(cell).join(","));
      }
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`\ufeff${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
    link.download = "review.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
  say();
})();
