// Elements from descriptions, changed in place: what a person has focused, opened or scrolled stays as it is.
// Whatever comes from a job becomes a text node or an attribute, never markup.

const SAFE_PROPERTIES = new Set(['onclick', 'ontoggle', 'open']);

/** Return a description of an element; children may be lists, and what is null, false or '' is left out. */
export function h(tag, props, ...children) {
  const kept = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== '');
  return { tag, props: props ?? {}, children: kept };
}

/** Make `parent` contain what `descriptions` say. A child with a `key` keeps its element wherever it moves. */
export function render(parent, descriptions) {
  const former = [...parent.childNodes];
  const keyed = new Map(former.filter((node) => node.madeKey !== undefined).map((node) => [node.madeKey, node]));
  const others = former.filter((node) => node.madeKey === undefined);
  const used = new Set();
  const nodes = descriptions.map((wanted) => {
    const node = reuse(wanted, keyed, others, used) ?? make(wanted);
    used.add(node);
    return node;
  });
  // First what goes: then those that stay in their order are not moved, and keep the focus.
  for (const node of former) if (!used.has(node)) node.remove();
  let place = parent.firstChild;
  nodes.forEach((node, index) => {
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    update(node, descriptions[index]);
  });
}

function reuse(wanted, keyed, others, used) {
  if (typeof wanted === 'object' && wanted.props.key !== undefined) {
    const found = keyed.get(wanted.props.key);
    return found && found.madeTag === wanted.tag && !used.has(found) ? found : null;
  }
  const tag = typeof wanted === 'object' ? wanted.tag : undefined;
  const index = others.findIndex((node) => node.madeTag === tag && (tag !== undefined || node.nodeType === Node.TEXT_NODE));
  return index < 0 ? null : others.splice(index, 1)[0];
}

function make(wanted) {
  if (typeof wanted !== 'object') return document.createTextNode(String(wanted));
  const node = document.createElement(wanted.tag);
  node.madeTag = wanted.tag;
  node.madeKey = wanted.props.key;
  node.madeProps = {};
  return node;
}

function update(node, wanted) {
  if (typeof wanted !== 'object') {
    if (node.data !== String(wanted)) node.data = String(wanted);
    return;
  }
  for (const name of Object.keys(node.madeProps)) if (!(name in wanted.props)) set(node, name, null);
  for (const [name, value] of Object.entries(wanted.props)) {
    if (name !== 'key' && node.madeProps[name] !== value) set(node, name, value);
  }
  node.madeProps = wanted.props;
  render(node, wanted.children);
}

function set(node, name, value) {
  if (SAFE_PROPERTIES.has(name)) node[name] = value;
  else if (name === 'style') Object.assign(node.style, value ?? {});
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? '' : String(value));
}
