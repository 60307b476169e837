SELECT count(*) FILTER (winner) AS documents,
    count(*) FILTER (winner AND file IS NULL AND w.id IS NULL) AS new,
    count(*) FILTER (winner AND file IS NULL AND w.id IS NOT NULL) AS changed,
    documents - new - changed AS unchanged,
    (SELECT count(*) FROM old ANTI JOIN (FROM placed WHERE winner) USING (id) WHERE winner) AS removed,
    count(*) FILTER (NOT winner AND live) AS shadowed,
    count(*) FILTER (winner AND NOT live AND source IN (SELECT source FROM damaged)) AS stale
FROM placed p LEFT JOIN (SELECT DISTINCT id FROM old WHERE winner) w ON w.id = p.id
