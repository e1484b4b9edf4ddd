/* The reader chooses one framework for all pages, in the page header or in the tabs of a group of panes. The choice
 * also selects the content that is shown only for one framework. It is stored in localStorage or, if that isn't
 * available, passed on in the query of links. */
(() => {
  "use strict";
  const FRAMEWORKS = ["numpy", "torch", "jax", "tf"];
  const KEY = "framework";
  const WIDE = 760; // minimum width in pixels of a group that shows two panes side by side

  let stored = true;
  function read() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      stored = false;
      return new URLSearchParams(location.search).get(KEY);
    }
  }
  function write(framework) {
    try {
      localStorage.setItem(KEY, framework);
    } catch {
      stored = false;
    }
  }

  let chosen = read();
  if (!FRAMEWORKS.includes(chosen)) chosen = "torch";

  function choose(framework) {
    chosen = framework;
    write(framework);
    show();
  }

  function show() {
    document.documentElement.dataset.framework = chosen;
    for (const select of document.querySelectorAll("#framework-choice")) select.value = chosen;
    for (const group of document.querySelectorAll(".panes:not(.is-single)")) showGroup(group);
  }

  /* Show the panes side by side if there is enough space, otherwise as tabs according to the WAI-ARIA practices. */
  function showGroup(group) {
    const tabbed = group.clientWidth < WIDE;
    const tablist = group.querySelector(".panes-tabs");
    tablist.hidden = !tabbed;
    group.classList.toggle("is-tabbed", tabbed);
    for (const tab of tablist.querySelectorAll("[role=tab]")) {
      const selected = tab.dataset.framework === chosen;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
    }
    for (const pane of group.querySelectorAll(".pane")) {
      const selected = pane.dataset.framework === chosen;
      pane.hidden = tabbed && !selected;
      pane.classList.toggle("is-chosen", selected);
      if (tabbed) {
        pane.setAttribute("role", "tabpanel");
        pane.setAttribute("aria-labelledby", `${pane.id}-tab`);
        pane.tabIndex = 0;
      } else {
        pane.removeAttribute("role");
        pane.setAttribute("aria-labelledby", `${pane.id}-title`);
        pane.removeAttribute("tabindex");
      }
    }
  }

  function onClick(event) {
    const tab = event.target.closest(".panes-tabs [role=tab]");
    if (tab) keepingPlace(tab, () => choose(tab.dataset.framework));
    const link = event.target.closest("a[href]");
    if (link && !stored && link.host === location.host && link.protocol === location.protocol) {
      const url = new URL(link.href);
      url.searchParams.set(KEY, chosen);
      link.href = url;
    }
  }

  function onKey(event) {
    const tab = event.target.closest(".panes-tabs [role=tab]");
    if (!tab) return;
    const tabs = [...tab.parentElement.querySelectorAll("[role=tab]")];
    const at = tabs.indexOf(tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[to % tabs.length];
    keepingPlace(next, () => choose(next.dataset.framework));
    next.focus();
  }

  /* Keep the scroll position of an element, because other groups on the page change their height. */
  function keepingPlace(element, change) {
    const before = element.getBoundingClientRect().top;
    change();
    window.scrollBy({ top: element.getBoundingClientRect().top - before, behavior: "instant" });
  }

  /* Make every element that scrolls accessible by keyboard. */
  function focusable() {
    for (const element of document.querySelectorAll(".bd-article table, .katex-display, .bd-article pre")) {
      const scrolls = element.scrollWidth > element.clientWidth || element.scrollHeight > element.clientHeight;
      if (scrolls) element.tabIndex = 0;
      else element.removeAttribute("tabindex");
    }
  }

  document.documentElement.dataset.framework = chosen;
  document.addEventListener("DOMContentLoaded", () => {
    document.addEventListener("click", onClick, true);
    document.addEventListener("keydown", onKey);
    for (const select of document.querySelectorAll("#framework-choice")) {
      select.addEventListener("change", () => choose(select.value));
    }
    const resized = new ResizeObserver((entries) => entries.forEach((entry) => showGroup(entry.target)));
    for (const group of document.querySelectorAll(".panes:not(.is-single)")) resized.observe(group);
    window.addEventListener("storage", () => {
      const other = read();
      if (FRAMEWORKS.includes(other)) {
        chosen = other;
        show();
      }
    });
    show();
    for (const formula of document.querySelectorAll(".math")) {
      window.katex.render(formula.textContent, formula, { displayMode: "display" in formula.dataset });
    }
    /* The theme doesn't label the toggles in its sidebar. */
    for (const summary of document.querySelectorAll("summary:has(.toctree-toggle)")) {
      const link = summary.closest("li").querySelector("a");
      summary.setAttribute("aria-label", `Pages below ${link.textContent.trim()}`);
    }
    focusable();
    document.fonts.ready.then(focusable);
    window.addEventListener("resize", focusable);
  });
})();
