"use strict";
/* The search: what is typed, how many nodes it finds, and the way from one to the next. */
const Search = (() => {
  function of(find, go) {
    const query = document.getElementById("query"), said = document.getElementById("hits");
    let hits = [], hit = -1;

    function search(words) {
      query.value = words;
      lookUp();
      next(1);
    }

    function lookUp() {
      hits = find(query.value);
      hit = -1;
      said.textContent = query.value.trim() ? (hits.length ? `${hits.length} found` : "nothing found") : "";
    }

    function next(by) {
      if (!hits.length) return;
      hit = (hit + by + hits.length) % hits.length;
      said.textContent = `${hit + 1} of ${hits.length}`;
      go(hits[hit]);
    }

    document.getElementById("search").addEventListener("submit", (event) => {
      event.preventDefault();
      next(1);
    });
    query.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !event.shiftKey) return;
      event.preventDefault();
      next(-1);
    });
    query.addEventListener("input", lookUp);
    return { lookUp, search };
  }

  return { of };
})();
