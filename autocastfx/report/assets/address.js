"use strict";
/* The part of the page's address after #: which variant is shown, and which node is selected. */
const Address = (() => {
  function read() {
    const said = new URLSearchParams(location.hash.slice(1));
    return { variant: said.get("variant"), node: said.get("node") };
  }

  /* Write it without a step in the history. A page inside another, which has no address, is left alone. */
  function write(variant, node) {
    if (location.protocol === "about:") return;
    const said = new URLSearchParams(node ? { variant, node } : {});
    history.replaceState(null, "", said.size ? `#${said}` : location.pathname + location.search);
  }

  return { read, write };
})();
