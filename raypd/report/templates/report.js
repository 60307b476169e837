"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const list = byId("documents");
  if (!list) return;
  const size = 20;
  const all = Array.from(list.children).map((node, at) => ({
    node, at, text: node.textContent.toLowerCase(), sure: Number(node.dataset.sure),
  }));
  let page = 0;
  const value = (id) => byId(id)?.value ?? "";
  const show = () => {
    const words = value("query").toLowerCase().split(/\s+/).filter(Boolean);
    const status = value("status"), category = value("category"), unsure = value("order") === "unsure";
    const found = all.filter((d) => words.every((w) => d.text.includes(w)) &&
      (!status || d.node.dataset.status === status) && (!category || d.node.dataset.category === category));
    found.sort((a, b) => (unsure ? a.sure - b.sure : 0) || a.at - b.at);
    const pages = Math.max(1, Math.ceil(found.length / size));
    page = Math.min(page, pages - 1);
    const shown = found.slice(page * size, (page + 1) * size);
    list.replaceChildren(...shown.map((d) => d.node));
    byId("place").textContent = found.length
      ? `${page * size + 1} to ${page * size + shown.length} of ${found.length}` : "";
    byId("back").disabled = page === 0;
    byId("on").disabled = page >= pages - 1;
    byId("pages").hidden = found.length <= size;
    byId("nothing").hidden = found.length > 0;
  };
  for (const id of ["query", "status", "category", "order"]) {
    byId(id)?.addEventListener("input", () => { page = 0; show(); });
  }
  const turn = (by) => { page += by; show(); byId("find").scrollIntoView({ block: "start" }); };
  byId("back").addEventListener("click", () => turn(-1));
  byId("on").addEventListener("click", () => turn(1));
  byId("find").addEventListener("submit", (event) => event.preventDefault());
  byId("find").hidden = false;
  show();
})();
