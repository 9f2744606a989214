"use strict";
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];

  // Theme: system, light, dark. Remembered where the browser allows it.
  const button = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = "system";
  try { theme = localStorage.getItem("theme") || "system"; } catch { /* a page from a file may have no storage */ }
  if (!themes.includes(theme)) theme = "system";
  show(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try { localStorage.setItem("theme", theme); } catch { /* as above */ }
  });

  // Tabs: one panel at a time; arrow keys move between them.
  const tabs = all('[role="tab"]');
  const choose = (tab) => tabs.forEach((other) => {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  });
  if (tabs.length) {
    all('[role="tablist"]').forEach((list) => { list.hidden = false; });
    all(".panel > h3").forEach((heading) => { heading.hidden = true; });
    choose(tabs.find((tab) => tab.getAttribute("aria-selected") === "true") || tabs[0]);
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => choose(tab));
      tab.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        const to = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1 : (i + by + tabs.length) % tabs.length;
        if (!by && event.key !== "Home" && event.key !== "End") return;
        event.preventDefault();
        choose(tabs[to]);
        tabs[to].focus();
      });
    });
  }

  // A link into a closed part opens it, and its panel, first.
  const reveal = (id) => {
    const target = id && document.getElementById(id);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) {
      if (at.tagName === "DETAILS") at.open = true;
      const tab = at.getAttribute && at.getAttribute("role") === "tabpanel" && tabs.find((t) => t.getAttribute("aria-controls") === at.id);
      if (tab) choose(tab);
    }
    target.scrollIntoView({ block: target.tagName === "SECTION" ? "start" : "center" });
  };
  const fromHash = () => reveal(decodeURIComponent(location.hash.slice(1)));
  addEventListener("hashchange", fromHash);
  all('a[href^="#"]').forEach((link) => link.addEventListener("click", () => {
    if (link.getAttribute("href") === location.hash) fromHash();
  }));
  fromHash();

  // Copy a command.
  if (navigator.clipboard) all(".copy").forEach((copy) => {
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(copy.previousElementSibling.textContent);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  });
})();
