# in one terminal
pgmb work hello:app --install
# in another
pgmb publish greet '"world"'
